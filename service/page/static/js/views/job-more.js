/** The lower parts of a job's page: memory, FP8 health, the timeline, logs, exports, checkpoints. Each fails alone. */

import { openFiles } from "../actions.js";
import { stacks } from "../chart/stack.js";
import { Logs } from "../logs.js";
import { Timeline } from "../timeline.js";
import { fill, h, panel, problem } from "../dom.js";
import { bytes, clock, percent, short } from "../figures.js";
import { count, number } from "../format.js";
import { isOver } from "../levels.js";
import { all } from "../requests.js";
import { planWords } from "./plan.js";

/** @typedef {import("./job.js").Shown} Shown */
/** @typedef {import("./job.js").Part} Part */

/**
 * Build the parts.
 * @param {Shown} shown @param {{memory: HTMLElement, rest: HTMLElement, query: URLSearchParams}} places
 * @returns {Part[]}
 */
export function parts(shown, { memory, rest, query }) {
  const health = panel("FP8 health");
  const timeline = new Timeline(shown);
  const logs = new Logs(shown, query);
  const [checkpoints, exports] = [panel("Checkpoints"), panel("Exports")];
  health.hidden = true;
  rest.append(health, h("div", { class: "halves" }, timeline.element, logs.element), exports, checkpoints);
  const { id } = shown;
  const saved = [
    new Saved(exports, shown, "Exports", { event: "job.exported", read: (signal) => exportsOf(id, signal) }),
    new Saved(checkpoints, shown, "Checkpoints", { event: "checkpoint", read: (signal) => checkpointsOf(id, signal) }),
  ];
  return [{ draw: () => drawMemory(memory, shown) }, { draw: () => drawHealth(health, shown) }, timeline, logs, ...saved];
}

/** @param {HTMLElement} side @param {Shown} shown */
function drawMemory(side, { job, measured }) {
  const memory = measured?.memory ?? null;
  const held = memory?.held ?? job.summary?.memory_bytes ?? null;
  const words = JSON.stringify([
    held,
    memory?.fp32,
    measured?.num_layers_converted,
    isOver(job.state),
    job.plan,
    job.measured_to_planned,
  ]);
  if (side.dataset.words === words) return;
  side.dataset.words = words;
  if (!held) {
    const note = !isOver(job.state)
      ? "Counted from live tensors after the first step."
      : job.progress
        ? "It was not measured."
        : "It ended before its first step.";
    return fill(side, panel("Memory", h("p", { class: "muted" }, note), planWords(job)));
  }
  const level = job.spec.precision.level;
  const bars = stacks([{ name: level, parts: held }, ...(memory ? [{ name: "fp32", parts: memory.fp32 }] : [])], true);
  const facts = [
    measured && `${count(measured.num_parameters)} parameters`,
    measured && `${count(measured.num_layers_converted)} layers converted, ${count(measured.num_layers_skipped)} kept`,
    memory?.peak && `peak ${bytes(memory.peak)} on the device`,
    memory?.host ? `${bytes(memory.host)} in host memory` : null,
  ].filter(Boolean);
  fill(side, panel("Memory", bars, h("p", { class: "muted" }, facts.join(" · ")), planWords(job)));
}

const HEALTH = ["Layer", "Operand", "SQNR", "Overflow", "Underflow", "amax", "Step"];

/** @param {HTMLElement} element @param {Shown} shown */
function drawHealth(element, { measured }) {
  const layers = measured?.layers ?? null;
  element.hidden = !layers?.length;
  const words = JSON.stringify(layers);
  if (!layers?.length || element.dataset.words === words) return;
  element.dataset.words = words;
  const rows = layers.map((layer) => [
    layer.layer,
    layer.operand,
    layer.sqnr_db === null ? "–" : `${number(layer.sqnr_db, 1)} dB`,
    percent(layer.overflow_ratio, 3),
    percent(layer.underflow_ratio, 3),
    short(layer.amax),
    count(layer.step),
  ]);
  fill(
    element,
    h("h2", {}, "FP8 health, worst layers first"),
    grid("FP8 health by layer", HEALTH, rows, 2),
    h(
      "p",
      { class: "muted" },
      "SQNR: signal to quantization noise. Overflow: share clamped to the format's maximum. Underflow: share that became zero.",
    ),
  );
}

const FEW_CHARACTERS = 20;

/** @param {string | Node} cell */
const tight = (cell) =>
  (typeof cell === "string" ? cell : (cell.textContent ?? "")).length <= FEW_CHARACTERS ? "tight" : null;

/**
 * Build a table. Columns from `figures` on hold numbers. A cell of a few words stays on one line.
 * @param {string} label @param {string[]} columns @param {(string | Node)[][]} rows @param {number} figures
 */
export function grid(label, columns, rows, figures) {
  const side = (/** @type {number} */ place) => (place >= figures ? "figure" : null);
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          columns.map((name, place) => h("th", { scope: "col", class: side(place) }, name)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) =>
          h(
            "tr",
            {},
            row.map((cell, place) => h("td", { class: side(place) ?? tight(cell) }, cell)),
          ),
        ),
      ),
    ),
  );
}

/** A list of what the job has saved. It is read again when an event says that there is another. */
class Saved {
  /**
   * @param {HTMLElement} element @param {Shown} shown @param {string} title
   * @param {{event: string, read: (signal: AbortSignal) => Promise<HTMLElement[]>}} list
   */
  constructor(element, shown, title, { event, read }) {
    this.element = element;
    this.shown = shown;
    this.title = title;
    this.event = event;
    this.read = read;
    this.#show();
  }

  draw() {}

  /** @param {import("../live.js").Message[]} messages */
  receive(messages) {
    if (
      messages.some(
        ({ kind, data }) =>
          kind === "event" && data.some((/** @type {{type: string}} */ { type }) => type.startsWith(this.event)),
      )
    )
      this.#show();
  }

  async #show() {
    const { signal } = this.shown;
    try {
      const children = await this.read(signal);
      this.element.hidden = children.length === 0;
      fill(this.element, h("h2", {}, this.title), children);
    } catch (error) {
      if (!signal.aborted) fill(this.element, h("h2", {}, this.title), problem(error));
    }
  }
}

/** @param {import("octet-types").Checkpoint | import("octet-types").Export} item */
const filesOf = (item) => h("button", { type: "button", class: "plain", onclick: () => openFiles(item) }, "Download…");

/** @param {string} id @param {AbortSignal} signal */
async function checkpointsOf(id, signal) {
  /** @type {import("octet-types").Checkpoint[]} */
  const items = await all(`/v1/jobs/${id}/checkpoints`, signal);
  if (!items.length) return [muted("None yet. One is written every ", h("code", {}, "training.checkpoint_every_minutes"), ".")];
  const rows = items
    .reverse()
    .map((item) => [
      count(item.step),
      number(item.loss),
      bytes(item.num_bytes),
      clock(item.created_at),
      h("code", {}, item.id),
      filesOf(item),
    ]);
  const fetching = muted("All files of one, each checked: ", h("code", {}, `octet download ${id} --checkpoint …`));
  return [grid("Checkpoints", ["Step", "Loss", "Size", "Written", "Id", "Files"], rows, 9), fetching];
}

/** @param {string} id @param {AbortSignal} signal */
async function exportsOf(id, signal) {
  /** @type {import("octet-types").Export[]} */
  const items = await all(`/v1/jobs/${id}/exports`, signal);
  if (!items.length) return [];
  const rows = items.reverse().map((item) => {
    const found = item.mismatch?.evaluation;
    const distance = found ? [found.kl_divergence.toPrecision(3), percent(found.top1_agreement)] : ["–", "–"];
    return [
      count(item.step),
      h("div", {}, h("code", {}, item.name), item.address ? muted(h("code", {}, item.address)) : null),
      bytes(item.num_bytes),
      clock(item.created_at),
      ...distance,
      filesOf(item),
    ];
  });
  const meaning = muted(
    "KL: of the trainer's evaluation from the files as a server computes them, nats per token, held-out tokens.",
  );
  return [grid("Exports", ["Step", "Name", "Size", "Written", "KL", "Same top", "Files"], rows, 9), meaning];
}

/** @param {...(string | HTMLElement)} children */
const muted = (...children) => h("p", { class: "muted" }, ...children);
