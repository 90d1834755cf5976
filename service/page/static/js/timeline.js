/** What happened to a job: the phases of its start as a bar, its attempts, and its events. */

import { ask } from "./api.js";
import { fill, h, panel, problem, say } from "./dom.js";
import { between, bytes, clock, short } from "./figures.js";
import { count, duration } from "./format.js";
import { isOver } from "./levels.js";
import { all } from "./requests.js";

/** @typedef {import("octet-types").Event} Event */
/** @typedef {import("octet-types").Attempt} Attempt */

const PHASES = /** @type {[string, string][]} */ ([
  ["placed_at", "queue"],
  ["process_up_at", "process"],
  ["torch_imported_at", "torch"],
  ["model_built_at", "model, data"],
  ["first_step_at", "first step"],
  ["warmed_up_at", "compilation"],
]);
const FEW = 10;

/** Write a fact of an event. @param {[string, unknown]} pair */
const fact = ([name, value]) =>
  /bytes$/.test(name)
    ? bytes(Number(value))
    : `${name.replace(/^num_/, "").replaceAll("_", " ")} ${typeof value === "number" ? short(value) : value}`;

export class Timeline {
  /** @type {Event[]} */
  events = [];
  /** @type {Attempt[]} */
  attempts = [];
  #isWhole = false;
  #drawn = "";
  #reading = Promise.resolve();

  /** @param {import("./views/job.js").Shown} shown */
  constructor(shown) {
    this.shown = shown;
    this.start = h("div", { class: "phases" });
    this.list = h("div", { class: "happened" });
    this.element = panel("Timeline", this.start, this.list);
    this.#reading = this.#read();
  }

  async #read() {
    const { id, signal } = this.shown;
    try {
      const [events, attempts] = await Promise.all([
        all(`/v1/jobs/${id}/events`, signal),
        ask(`/v1/jobs/${id}/attempts?limit=1000`, { signal }),
      ]);
      for (const event of events) this.#take(event);
      this.attempts = attempts.data;
      this.draw();
    } catch (error) {
      if (!signal.aborted) fill(this.list, problem(error));
    }
  }

  /** @param {Event} event */
  #take(event) {
    if (event.seq > (this.events[this.events.length - 1]?.seq ?? 0)) this.events.push(event);
  }

  /** @param {import("./live.js").Message[]} messages */
  receive(messages) {
    const events = /** @type {Event[]} */ (messages.flatMap(({ kind, data }) => (kind === "event" ? data : [])));
    for (const event of events) this.#take(event);
    if (events.some(({ type }) => type.startsWith("attempt"))) this.#reading = this.#reading.then(() => this.#read());
  }

  draw() {
    this.#drawStart();
    const words = `${this.events.length} ${this.#isWhole} ${this.attempts.map(({ state }) => state)}`;
    if (words === this.#drawn) return;
    this.#drawn = words;
    const newest = [...this.events].reverse();
    const shown = this.#isWhole ? newest : newest.slice(0, FEW);
    const more =
      newest.length > shown.length
        ? h(
            "button",
            {
              type: "button",
              class: "plain",
              onclick: () => {
                this.#isWhole = true;
                this.draw();
              },
            },
            `Show all ${newest.length} events`,
          )
        : null;
    fill(
      this.list,
      h(
        "ol",
        { class: "events", reversed: true },
        shown.map((event) => this.#line(event)),
      ),
      more,
    );
  }

  /** @param {Event} event */
  #line({ at, type, message, attempt_id, data }) {
    const attempt = this.attempts.find(({ id }) => id === attempt_id);
    const facts = Object.entries(data).map(fact).join(" · ");
    const bad = /fail|lost|expired|demoted|skipped/.test(type);
    return h(
      "li",
      { class: bad ? "poor" : null },
      h("time", { datetime: at }, clock(at)),
      h("code", {}, type),
      h("span", {}, message, facts && h("small", {}, facts)),
      h("small", {}, attempt ? `attempt ${attempt.epoch}` : ""),
    );
  }

  /** Draw how long each phase of the present attempt's start took. */
  #drawStart() {
    const { start, num_attempts, state } = this.shown.job;
    if (!start) return;
    let before = start.accepted_at;
    /** @type {[string, number][]} */
    const took = [];
    for (const [field, name] of PHASES) {
      const at = /** @type {Record<string, string | null>} */ (/** @type {unknown} */ (start))[field];
      if (!at) continue;
      took.push([name, Math.max(0, between(before, at) ?? 0)]);
      before = at;
    }
    const isStarting = !start.first_step_at && !isOver(state);
    const phase = PHASES[took.length]?.[1];
    if (isStarting && phase) took.push([phase, (Date.now() - Date.parse(before)) / 1000]);
    const whole = took.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
    if (this.start.childElementCount !== took.length + 1) {
      fill(
        this.start,
        h("p", { class: "muted" }),
        took.map(([name], place) => h("span", { class: `phase phase-${place}` }, h("i"), h("small", {}, `${name} `, h("b")))),
      );
    }
    const attempts = num_attempts > 1 ? ` of attempt ${count(num_attempts)}` : "";
    const ends = isStarting
      ? `The start${attempts} has taken ${duration(whole)}; now: ${phase}`
      : `The start${attempts} took ${duration(whole)} from the submission to the first step`;
    say(this.start.children[0], ends);
    took.forEach(([, seconds], place) => {
      const element = /** @type {HTMLElement} */ (this.start.children[place + 1]);
      element.style.flexGrow = String(Math.max(0.02, seconds / whole));
      say(/** @type {Element} */ (element.querySelector("b")), duration(seconds));
    });
  }

  /** Return where the stream of events goes on. */
  get cursor() {
    return `event.${this.shown.id}.${this.events[this.events.length - 1]?.seq ?? 0}`;
  }
}
