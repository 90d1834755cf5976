/** One stream of changes from the server for all tabs that share a key. It runs in a SharedWorker, or in the tab itself. */

/**
 * @typedef {object} Client
 * @property {string} key
 * @property {string | null} list the query of a list of jobs
 * @property {string[]} jobs ids of jobs whose rows are followed
 * @property {string[]} cursors places in sources: `points.JOB.EPOCH.STEP.EVALUATED`, `event.JOB.SEQ`, `log_line.JOB.SEQ`
 * @property {(messages: any[]) => void} post
 */

const FIRST_WAIT_MS = 250;
const LONGEST_WAIT_MS = 4000;
const SILENT_MS = 40_000;
const [MOST_LISTS, MOST_JOBS] = [8, 16];
const PARAMETERS = /** @type {Record<string, string>} */ ({ points: "points", event: "events", log_line: "logs" });

/** Joins the wishes of all clients. A line is what one key may see. */
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
  /** How far each source of each job was read, by `points.JOB`. @type {Map<string, number[]>} */
  #places = new Map();
  /** Lists as they are now. @type {Map<string, {total: number, ids: string[], rows: Map<string, any>}>} */
  #lists = new Map();
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
    for (const cursor of client.cursors) {
      const [source, place] = parted(cursor);
      const known = this.#places.get(source);
      if (known && !isBefore(place, known)) continue;
      if (known) this.#wanted = "";
      this.#places.set(source, place);
    }
    const list = client.list === null ? undefined : this.#lists.get(client.list);
    client.post([
      this.#state,
      ...(list
        ? [{ kind: "rows", list: client.list, total: list.total, ids: list.ids, changed: [...list.rows.values()] }]
        : []),
    ]);
    this.#change();
  }

  /** @param {Client} client */
  remove(client) {
    this.clients.delete(client);
    this.#change();
  }

  /** Open other streams if the clients want something else. Tabs come in bursts, so it waits a moment. */
  #change() {
    clearTimeout(this.#waiting);
    this.#waiting = setTimeout(() => {
      const streams = this.#wishes();
      if (JSON.stringify(streams) === this.#wanted) return;
      this.#wanted = JSON.stringify(streams);
      this.#open.abort();
      this.#open = new AbortController();
      for (const wish of streams) this.#follow(wish, this.#open.signal);
    }, 30);
  }

  /**
   * Divide what the clients want into streams; one has room for sixteen jobs.
   * @returns {{lists: string[], sources: string[]}[]}
   */
  #wishes() {
    const clients = [...this.clients];
    const sources = [...new Set(clients.flatMap(({ cursors }) => cursors.map((cursor) => parted(cursor)[0])))].sort();
    for (const source of this.#places.keys()) if (!sources.includes(source)) this.#places.delete(source);
    const jobs = [...new Set(clients.flatMap((client) => client.jobs))].sort();
    const lists = [...new Set(clients.flatMap(({ list }) => list ?? []))].sort();
    for (let from = 0; from < jobs.length; from += 100)
      lists.push(
        `${jobs
          .slice(from, from + 100)
          .map((id) => `id=${id}`)
          .join("&")}&limit=100`,
      );
    for (const list of this.#lists.keys()) if (!lists.includes(list)) this.#lists.delete(list);
    const followed = [...new Set(sources.map((source) => source.split(".")[1]))];
    const num = Math.max(Math.ceil(lists.length / MOST_LISTS), Math.ceil(followed.length / MOST_JOBS));
    return Array.from({ length: num }, (_, place) => {
      const some = followed.slice(place * MOST_JOBS, (place + 1) * MOST_JOBS);
      return {
        lists: lists.slice(place * MOST_LISTS, (place + 1) * MOST_LISTS),
        sources: sources.filter((source) => some.includes(source.split(".")[1])),
      };
    });
  }

  /**
   * Read a stream, and open it again from the last places when it breaks.
   * @param {{lists: string[], sources: string[]}} wish @param {AbortSignal} signal
   */
  async #follow(wish, signal) {
    let wait = FIRST_WAIT_MS;
    while (!signal.aborted) {
      try {
        for await (const messages of this.#read(wish, signal)) {
          wait = FIRST_WAIT_MS;
          this.#hand(messages);
        }
      } catch (error) {
        // The status below says it, and the loop tries again: without sources if a job was deleted, whose list says which.
        if (/** @type {Error} */ (error).message === "status 404") wish = { ...wish, sources: [] };
      }
      if (signal.aborted) return;
      this.#become("lost");
      await new Promise((resolve) => setTimeout(resolve, wait));
      wait = Math.min(2 * wait, LONGEST_WAIT_MS);
    }
  }

  /** @param {{lists: string[], sources: string[]}} wish @param {AbortSignal} signal */
  async *#read({ lists, sources }, signal) {
    const query = new URLSearchParams(lists.map((list) => ["rows", list]));
    for (const source of sources) query.append(PARAMETERS[source.split(".")[0]], source.split(".")[1]);
    if (sources.length)
      query.set("after", sources.map((source) => [source, ...(this.#places.get(source) ?? [])].join(".")).join(","));
    const silent = new AbortController();
    let timer = setTimeout(() => silent.abort(), SILENT_MS);
    const headers = { Accept: "text/event-stream", ...(this.key ? { Authorization: `Bearer ${this.key}` } : {}) };
    const answer = await fetch(`/v1/stream?${query}`, {
      headers,
      cache: "no-store",
      signal: AbortSignal.any([signal, silent.signal]),
    });
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

  /** Say that jobs were deleted, and follow them no longer. @param {string[]} jobs */
  #lose(jobs) {
    for (const client of this.clients) {
      const own = jobs.filter((job) => client.jobs.includes(job));
      client.jobs = client.jobs.filter((job) => !own.includes(job));
      client.cursors = client.cursors.filter((cursor) => !own.includes(cursor.split(".")[1]));
      if (own.length) client.post(own.map((job) => ({ kind: "gone", job })));
    }
    if (jobs.length) this.#change();
  }

  /**
   * Keep the places and the lists, and hand each client what it follows.
   * @param {NonNullable<ReturnType<typeof parse>>[]} messages
   */
  #hand(messages) {
    for (const { kind, id, ...message } of messages) {
      for (const cursor of id ? id.split(",") : []) {
        const [source, place] = parted(cursor);
        if (this.#places.has(source)) this.#places.set(source, place);
      }
      if (kind === "rows") this.#list(/** @type {any} */ (message));
    }
    for (const client of this.clients) {
      const sources = new Set(client.cursors.map((cursor) => parted(cursor)[0]));
      const own = messages.flatMap((message) => {
        if (message.kind !== "rows") return sources.has(`${message.kind}.${message.job}`) ? [message] : [];
        if (message.list === client.list) return [message];
        return message.changed
          .filter((/** @type {{id: string}} */ row) => client.jobs.includes(row.id))
          .map((/** @type {{id: string}} */ row) => ({ kind: "row", job: row.id, data: row }));
      });
      if (own.length) client.post(own);
    }
  }

  /** @param {{list: string, total: number, ids: string[] | null, changed: any[]}} message */
  #list({ list, total, ids, changed }) {
    if (ids && list.startsWith("id=")) this.#lose(new URLSearchParams(list).getAll("id").filter((id) => !ids.includes(id)));
    const before = this.#lists.get(list);
    const known = new Map([...(before?.rows ?? []), ...changed.map((row) => /** @type {[string, any]} */ ([row.id, row]))]);
    const order = ids ?? before?.ids ?? [];
    this.#lists.set(list, { total, ids: order, rows: new Map(order.map((id) => [id, known.get(id)])) });
  }

  /** @param {"live" | "lost"} state */
  #become(state) {
    if (this.#state.state === state) return;
    this.#state = { kind: "status", state, at: Date.now() };
    for (const client of this.clients) client.post([this.#state]);
  }
}

/** Divide a cursor into its source and its place. @param {string} cursor @returns {[string, number[]]} */
function parted(cursor) {
  const [name, job, ...place] = cursor.split(".");
  return [`${name}.${job}`, place.map(Number)];
}

/** @param {number[]} one @param {number[]} other */
function isBefore(one, other) {
  const differs = one.findIndex((number, place) => number !== other[place]);
  return differs >= 0 && one[differs] < other[differs];
}

/** Parse one server-sent event. A comment that keeps the connection open gives null. @param {string} text */
export function parse(text) {
  let [kind, id, data] = ["message", "", ""];
  for (const line of text.split("\n")) {
    if (line.startsWith("event: ")) kind = line.slice(7);
    else if (line.startsWith("id: ")) id = line.slice(4);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  if (!data) return null;
  const read = JSON.parse(data);
  return kind === "rows" ? { ...read, kind, id, list: read.rows } : { kind, id, job: read.job_id, data: read.data };
}
