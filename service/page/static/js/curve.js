/** A job's curve in columns: buckets of steps as the server gives them, then the steps that arrive one by one. */

import { ask, address } from "./api.js";
import { firstAt } from "./chart/decimate.js";

/** @typedef {import("octet-types").Curve} Answer */
/** @typedef {import("octet-types").Points} Points */

const BUCKETS = 800;
const MOST_LIVE = 6000;
const COLUMNS = /** @type {const} */ ([
  "step",
  "at",
  "numSteps",
  "loss",
  "least",
  "greatest",
  "norm",
  "rate",
  "tokens",
  "time",
  "wait",
]);

export class Curve {
  /** @type {number[]} */ step = [];
  /** @type {number[]} */ at = [];
  /** @type {number[]} */ numSteps = [];
  /** @type {(number | null)[]} */ loss = [];
  /** @type {(number | null)[]} */ least = [];
  /** @type {(number | null)[]} */ greatest = [];
  /** @type {(number | null)[]} */ norm = [];
  /** @type {(number | null)[]} */ rate = [];
  /** Trained up to here. @type {number[]} */ tokens = [];
  /** Seconds of training up to here. @type {number[]} */ time = [];
  /** Seconds of waiting for data up to here. @type {number[]} */ wait = [];
  evaluations = {
    step: /** @type {number[]} */ ([]),
    loss: /** @type {(number | null)[]} */ ([]),
    metrics: /** @type {Record<string, (number | null)[]>} */ ({}),
  };
  cursor = "";
  stepBy = 1;
  #live = 0;

  /** @param {string} id @param {AbortSignal} signal */
  constructor(id, signal) {
    this.id = id;
    this.signal = signal;
  }

  get last() {
    return this.step[this.step.length - 1] ?? 0;
  }

  /** Read the whole curve. */
  async load() {
    /** @type {Answer} */
    const answer = await ask(address(`/v1/jobs/${this.id}/curve`, { points: BUCKETS }), { signal: this.signal });
    for (const name of COLUMNS) this[name].length = 0;
    this.evaluations = {
      step: [...answer.evaluations.step],
      loss: [...answer.evaluations.loss],
      metrics: copied(answer.evaluations.metrics),
    };
    this.cursor = answer.cursor;
    this.stepBy = answer.step_by;
    this.#live = 0;
    for (const place of answer.step.keys()) {
      const { loss, loss_least, loss_greatest, gradient_norm, learning_rate } = answer;
      this.#push(answer, place, [
        answer.num_steps[place],
        loss[place],
        loss_least[place],
        loss_greatest[place],
        gradient_norm[place],
        learning_rate[place],
      ]);
    }
    return this;
  }

  /** Add steps that were streamed. Those that they replace go first. @param {Points} points */
  add(points) {
    this.#drop(points.after);
    for (const place of points.step.keys()) {
      if (points.step[place] <= this.last) continue;
      const loss = points.loss[place];
      this.#push(points, place, [1, loss, loss, loss, points.gradient_norm[place], points.learning_rate[place]]);
      this.#live++;
    }
    this.#evaluate(points);
    if (this.#live > MOST_LIVE) this.load().catch(() => {});
  }

  /**
   * @param {Pick<Points, "step" | "at" | "tokens" | "step_time_s" | "data_wait_s">} from @param {number} place
   * @param {[number, number | null, number | null, number | null, number | null, number | null]} values
   */
  #push(from, place, [numSteps, loss, least, greatest, norm, rate]) {
    const end = this.step.length - 1;
    this.step.push(from.step[place]);
    this.at.push(from.at[place]);
    this.numSteps.push(numSteps);
    this.loss.push(loss);
    this.least.push(least);
    this.greatest.push(greatest);
    this.norm.push(norm);
    this.rate.push(rate);
    this.tokens.push((this.tokens[end] ?? 0) + from.tokens[place]);
    this.time.push((this.time[end] ?? 0) + from.step_time_s[place]);
    this.wait.push((this.wait[end] ?? 0) + from.data_wait_s[place]);
  }

  /** Forget the steps after one. @param {number} after */
  #drop(after) {
    const keep = firstAt(this.step, after + 1);
    if (keep >= this.step.length) return;
    const cutsBucket = this.numSteps[keep] > 1 && (this.step[keep - 1] ?? 0) < after;
    for (const name of COLUMNS) this[name].length = keep;
    if (cutsBucket) this.load().catch(() => {});
  }

  /** @param {Points} points */
  #evaluate(points) {
    const { step, loss, metrics } = this.evaluations;
    const keep = firstAt(step, points.evaluated_after + 1);
    for (const column of [step, loss, ...Object.values(metrics)]) column.length = Math.min(column.length, keep);
    for (const place of points.evaluation_step.keys()) {
      if (points.evaluation_step[place] <= (step[step.length - 1] ?? 0)) continue;
      step.push(points.evaluation_step[place]);
      loss.push(points.evaluation_loss[place]);
      for (const [name, column] of Object.entries(points.evaluation_metrics)) {
        (metrics[name] ??= Array(step.length - 1).fill(null)).push(column[place]);
      }
    }
  }

  /** Return the column that stands on an axis. @param {string} axis `step`, `tokens` or `time` */
  along(axis) {
    return axis === "tokens" ? this.tokens : axis === "time" ? this.time : this.step;
  }

  /** Return where the evaluations stand on an axis. @param {string} axis */
  evaluatedAlong(axis) {
    if (axis === "step") return this.evaluations.step;
    const column = this.along(axis);
    return this.evaluations.step.map((step) => column[Math.min(firstAt(this.step, step), column.length - 1)] ?? 0);
  }

  /** Tokens per second over each bucket. @returns {(number | null)[]} */
  speeds() {
    return this.step.map((_, place) => {
      const seconds = this.time[place] - (this.time[place - 1] ?? 0);
      return seconds > 0 ? (this.tokens[place] - (this.tokens[place - 1] ?? 0)) / seconds : null;
    });
  }
}

/** @param {Record<string, readonly (number | null)[]>} metrics */
const copied = (metrics) => Object.fromEntries(Object.entries(metrics).map(([name, column]) => [name, [...column]]));
