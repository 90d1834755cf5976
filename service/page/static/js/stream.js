/** One stream of changes from the server for all tabs that share a key. It runs in a SharedWorker, or in the tab itself. */

/** @typedef {{id: string, step: number, event: number, log: number}} Position */
/** @typedef {{key: string, rows: boolean, jobs: Position[], post: (messages: any[]) => void}} Client */

const FIRST_WAIT_MS = 250;
const LONGEST_WAIT_MS = 4000;
const SILENT_MS = 40_000;

/** Joins the wishes of all clients. A line is a stream; each key has its own. */
export class Hub {
  /** @type {Map<string, Line>} */
  #lines = new Map();

  /** @param {Client} client */
  join(client) {
    const line = this.#lines.get(client.key) ?? new Line(client.key);
    this.#lines.set(client.key, line);
    line.add(client);
  }

  /** @param {Client} client */
  leave(client) {
    const line = this.#lines.get(client.key);
    line?.remove(client);
    if (line && !line.clients.size) this.#lines.delete(client.key);
  }
}

class Line {
  /** @type {Set<Client>} */
  clients = new Set();
  /** Where each job's stream is, by id. @type {Map<string, Position>} */
  #places = new Map();
  #open = new AbortController();
  #wanted = "";
  #state = { kind: "status", state: "connecting", at: Date.now() };
  #waiting = 0;

  /** @param {string} key */
  constructor(key) {
    this.key = key;
  }

  /** @param {Client} client */
  add(client) {
    this.clients.add(client);
    let isBehind = false;
    for (const job of client.jobs) {
      const place = this.#places.get(job.id);
      if (place && place.step <= job.step && place.event <= job.event && place.log <= job.log) continue;
      isBehind = true;
      this.#places.set(job.id, place ? lesser(place, job) : { ...job });
    }
    client.post([this.#state]);
    this.#change(isBehind);
  }

  /** @param {Client} client */
  remove(client) {
    this.clients.delete(client);
    this.#change(false);
  }

  /** Open another stream if the clients want something else. Tabs come in bursts, so it waits a moment. @param {boolean} must */
  #change(must) {
    if (must) this.#wanted = "";
    clearTimeout(this.#waiting);
    this.#waiting = setTimeout(() => {
      const wanted = this.#wishes();
      if (wanted === this.#wanted) return;
      this.#wanted = wanted;
      this.#open.abort();
      this.#open = new AbortController();
      if (this.clients.size) this.#follow(this.#open.signal);
    }, 30);
  }

  #wishes() {
    const jobs = new Set([...this.clients].flatMap((client) => client.jobs.map((job) => job.id)));
    for (const id of this.#places.keys()) if (!jobs.has(id)) this.#places.delete(id);
    return `${[...this.clients].some((client) => client.rows)} ${[...jobs].sort().join()}`;
  }

  /** Read the stream, and open it again from the last places when it breaks. @param {AbortSignal} signal */
  async #follow(signal) {
    let wait = FIRST_WAIT_MS;
    while (!signal.aborted) {
      try {
        for await (const messages of this.#read(signal)) {
          wait = FIRST_WAIT_MS;
          this.#hand(messages);
        }
      } catch {
        // The line below says it, and the loop tries again.
      }
      if (signal.aborted) return;
      this.#become("lost");
      await new Promise((resolve) => setTimeout(resolve, wait));
      wait = Math.min(2 * wait, LONGEST_WAIT_MS);
    }
  }

  /** @param {AbortSignal} signal */
  async *#read(signal) {
    const silent = new AbortController();
    let timer = setTimeout(() => silent.abort(), SILENT_MS);
    const options = { headers: { Accept: "text/event-stream", ...(this.key ? { Authorization: `Bearer ${this.key}` } : {}) } };
    const answer = await fetch(this.#address(), { ...options, cache: "no-store", signal: AbortSignal.any([signal, silent.signal]) });
    if (!answer.ok || !answer.body) throw new Error(`status ${answer.status}`);
    this.#become("live");
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => silent.abort(), SILENT_MS);
      const parts = (rest + value).split("\n\n");
      rest = parts.pop() ?? "";
      yield parts.map(parse).filter((message) => message !== null);
    }
  }

  #address() {
    const query = new URLSearchParams();
    if ([...this.clients].some((client) => client.rows)) query.set("rows", "true");
    for (const { id, step, event, log } of this.#places.values()) query.append("job", `${id}:${step}:${event}:${log}`);
    return `/v1/stream?${query}`;
  }

  /** Keep the places, and hand each client what it watches. @param {any[]} messages */
  #hand(messages) {
    for (const { kind, job, data } of messages) {
      const place = this.#places.get(job);
      if (!place) continue;
      if (kind === "points") place.step = data.last_step;
      else if (kind === "event") place.event = Math.max(place.event, data.seq);
      else if (kind === "log_line") place.log = Math.max(place.log, data.seq);
    }
    for (const client of this.clients) {
      const jobs = new Set(client.jobs.map((job) => job.id));
      const own = messages.filter(({ kind, job }) => (kind === "row" ? client.rows || jobs.has(job) : jobs.has(job)));
      if (own.length) client.post(own);
    }
  }

  /** @param {"live" | "lost"} state */
  #become(state) {
    if (this.#state.state === state) return;
    const messages = [{ kind: "status", state, at: Date.now() }];
    if (this.#state.state === "lost") messages.push({ kind: "again", state, at: Date.now() });
    this.#state = messages[0];
    for (const client of this.clients) client.post(messages);
  }
}

/** @param {Position} one @param {Position} other @returns {Position} */
function lesser(one, other) {
  return { id: one.id, step: Math.min(one.step, other.step), event: Math.min(one.event, other.event), log: Math.min(one.log, other.log) };
}

/** Parse one server-sent event. A comment that keeps the connection open gives null. @param {string} text */
export function parse(text) {
  let [kind, data] = ["message", ""];
  for (const line of text.split("\n")) {
    if (line.startsWith("event: ")) kind = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  if (!data) return null;
  const read = JSON.parse(data);
  return { kind, job: read.job_id ?? read.id, data: read };
}
