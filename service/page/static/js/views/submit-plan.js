/** The plan beside the form: what the job would take, asked for once it is valid and nobody types. */

import { ApiError, headers } from "../api.js";
import { fill, h, panel, problem } from "../dom.js";
import { bytes, short } from "../figures.js";
import { count } from "../format.js";
import { badge } from "../levels.js";
import { grid } from "./job-more.js";
import { bounds } from "./plan.js";

/** @typedef {import("octet-types").PlanRow} PlanRow */

const PAUSE_MS = 900;
const FITS = { yes: "fits", tight: "may not", no: "no", unknown: "states do" };

export class PlanBeside {
  #waiting = 0;
  #asked = "";
  #asking = new AbortController();

  /** @param {AbortSignal} signal */
  constructor(signal) {
    this.signal = signal;
    this.place = h("div", { "aria-live": "polite" }, h("p", { class: "muted" }, "Once the job is valid."));
    this.element = panel("Plan", this.place);
    signal.addEventListener("abort", () => this.#stop());
  }

  #stop() {
    clearTimeout(this.#waiting);
    this.#asking.abort();
  }

  /**
   * Plan a valid job, unless this was asked last.
   * @param {any} job @param {string[]} levels none: all, with the peak of its own
   */
  show(job, levels) {
    const { name: _name, labels: _labels, priority: _priority, data: _data, ...others } = job;
    const words = JSON.stringify([others, levels]);
    if (words === this.#asked) return;
    this.#stop();
    this.#asked = words;
    this.#asking = new AbortController();
    const { signal } = this.#asking;
    const peaks = levels.length ? "all" : "own"; // whoever types shall not wait for the others
    this.#waiting = setTimeout(() => this.#ask({ job, levels, peaks }, signal), PAUSE_MS);
  }

  /** @param {{job: any, levels: string[], peaks: string}} request @param {AbortSignal} signal */
  async #ask(request, signal) {
    fill(this.place, h("p", { class: "muted" }, "Planning… The first plan of a server takes some seconds."));
    try {
      for await (const plan of sendForLines("/v1/plans", request, signal)) fill(this.place, planTable(plan));
    } catch (error) {
      if (signal.aborted) return;
      this.#asked = "";
      fill(this.place, problem(error));
    }
  }
}

/** @param {string | null | undefined} words */
const sentence = (words = "") => `${words?.slice(0, 1).toUpperCase()}${words?.slice(1)}.`;

/** Show what a job would take at each level. @param {import("octet-types").Plan} plan @returns {HTMLElement[]} */
function planTable(plan) {
  const fits = plan.rows.map((row) => fitOf(row, plan.pool));
  const [hasRoom, hasTime] = [fits.some((fit) => fit), fits.some((fit) => fit?.floor)];
  const rows = plan.rows.map((row) => levelRow(row, plan.pool, hasRoom, hasTime));
  const columns = [
    "Level",
    "Bytes of a rank",
    ...(hasRoom ? ["Fits", "Micro-batch"] : []),
    ...(hasTime ? ["Step", "In all"] : []),
  ];
  const reasons = [
    ...new Set(plan.rows.map(({ reason }) => reason).filter((reason) => reason && !/^only states/.test(reason))),
  ];
  const changes = (plan.changes ?? []).map(({ change, level }) => change ?? `precision.level ${level}`);
  return [
    plan.chosen_level ? h("p", { class: "good" }, `auto chooses ${plan.chosen_level} in pool ${plan.pool}.`) : null,
    grid("Plan by level", columns, rows, 1),
    changes.length ? h("p", { class: "muted" }, `It would fit pool ${plan.pool} with one of: ${changes.join(", ")}.`) : null,
    h("p", { class: "muted" }, meaning(plan, hasTime), ...reasons.map((reason) => ` ${sentence(reason)}`)),
    ...(plan.missing ?? []).map((what) => h("p", { class: "muted" }, sentence(what))),
  ].filter((each) => each !== null);
}

/** @param {import("octet-types").Plan} plan @param {boolean} hasTime */
const meaning = ({ micro_batch_size: size, workers }, hasTime) =>
  `Of the rank that holds most, of ${workers}, in micro-batches of ${size}: the step's peak from its lower to its upper bound` +
  ` where that was traced (bold), else the states alone.${hasTime ? " Times are predicted, by published rates." : ""}`;

/** @param {PlanRow} row @param {string} pool */
const fitOf = (row, pool) => row.fits?.find((fit) => fit.pool === pool);

/** @param {PlanRow} row @param {string} pool @param {boolean} hasRoom @param {boolean} hasTime @returns {(string | Node)[]} */
function levelRow(row, pool, hasRoom, hasTime) {
  const fit = fitOf(row, pool);
  const classes = Object.entries(row.peak_by_class ?? {}).filter(([, size]) => size);
  const title = classes.map(([name, size]) => `${name.replace("_", " ")} ${bytes(size)}`).join(", ");
  const size = row.peak_bytes == null ? bounds(row) : h("strong", { title }, bounds(row));
  const most = fit?.largest_micro_batch == null ? "–" : count(fit.largest_micro_batch);
  const verdict = fit ? h("span", { class: fit.verdict === "no" ? "bad" : null }, FITS[fit.verdict]) : "–";
  return [badge(row.level), size, ...(hasRoom ? [verdict, most] : []), ...(hasTime ? times(fit) : [])];
}

/** Write how long a step takes, and at least all of them. @param {ReturnType<typeof fitOf>} fit */
function times(fit) {
  if (!fit?.floor) return ["–", "–"];
  const { step_s: least, hours, price } = fit.floor;
  const step = fit.predicted ? `${short(fit.predicted.least_s)} to ${short(fit.predicted.most_s)} s` : `≥ ${short(least)} s`;
  const all = hours == null ? "–" : `≥ ${short(hours)} h${price == null ? "" : `, price ≥ ${short(price)}`}`;
  return [step, all];
}

/**
 * Send a document, and yield those of the answer, one in each line, as they come. Raises as `ask` does.
 * @param {string} path @param {unknown} body @param {AbortSignal} signal @returns {AsyncGenerator<any>}
 */
async function* sendForLines(path, body, signal) {
  const asked = { ...headers(), "Content-Type": "application/json", Accept: "application/x-ndjson" };
  const answer = await fetch(path, { method: "POST", body: JSON.stringify(body), signal, headers: asked }).catch((error) => {
    throw signal.aborted ? error : new ApiError(0, { title: "The server does not answer" });
  });
  if (answer.status === 401) dispatchEvent(new CustomEvent("octet-key-needed"));
  if (!answer.ok || !answer.body) throw new ApiError(answer.status, await answer.json().catch(() => ({})));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) yield JSON.parse(line);
  }
}
