/** Several jobs beside a baseline: a verdict, their curves, the differences, bytes and speed, and the fields that differ. */

import { readJob } from "../measured.js";
import { LineChart } from "../chart/line.js";
import { Curve } from "../curve.js";
import { fill, h, panel, problem } from "../dom.js";
import { compact } from "../figures.js";
import { count, duration, number } from "../format.js";
import { badge, hue } from "../levels.js";
import { watch } from "../live.js";
import { remember } from "../main.js";
import { every, paced } from "../pace.js";
import { differences, judge, smoothed, spread } from "../judge.js";
import { chooser, MOST } from "./compare-choose.js";
import { dashAmong, detail } from "./compare-more.js";

/** @typedef {{job: import("octet-types").Job, curve: Curve, measured: import("octet-types").Measurements | null}} Compared */

const AXES = /** @type {Record<string, (value: number) => string>} */ ({
  step: (value) => count(value),
  tokens: compact,
  time: (value) => duration(value),
});

/** @param {import("../main.js").Place} place */
export async function show({ root, query, signal }) {
  const ids = [...new Set((query.get("jobs") ?? "").split(",").filter(Boolean))].slice(0, MOST);
  root.append(h("h1", {}, "Compare"), chooser(ids, signal));
  if (!ids.length) {
    await (await import("./comparisons.js")).list(root, query, signal);
    return;
  }
  const read = await Promise.all(ids.map((id) => compared(id, signal).catch((error) => ({ id, error }))));
  const lost = read.filter((each) => "error" in each);
  const jobs = /** @type {Compared[]} */ (read.filter((each) => !("error" in each)));
  root.append(...lost.map(({ id, error }) => h("div", {}, h("code", {}, id), problem(error))));
  if (!jobs.length) return;
  const view = new Comparison(jobs, query, signal);
  root.append(...view.elements);
  view.draw();
  const soon = paced(() => view.draw(), signal);
  every(
    5,
    () => {
      if (view.isLive) soon();
    },
    signal,
  );
  watch(
    { jobs: jobs.map(({ job }) => job.id), cursors: jobs.map(({ curve }) => curve.cursor) },
    (messages) => {
      for (const { kind, job: id, data } of messages) {
        const one = jobs.find(({ job }) => job.id === id);
        if (one && kind === "points") for (const points of data) one.curve.add(points);
        if (one && kind === "row") one.job.state = data.state;
      }
      soon();
    },
    signal,
  );
}

/** @param {string} id @param {AbortSignal} signal @returns {Promise<Compared>} */
async function compared(id, signal) {
  const [[job, measured], curve] = await Promise.all([readJob(id, signal), new Curve(id, signal).load()]);
  return { job, curve, measured };
}

class Comparison {
  /** @param {Compared[]} jobs @param {URLSearchParams} query @param {AbortSignal} signal */
  constructor(jobs, query, signal) {
    this.jobs = jobs;
    this.base = jobs.find(({ job }) => job.id === query.get("base")) ?? jobs[0];
    this.axis = query.get("x") && AXES[query.get("x") ?? ""] ? /** @type {string} */ (query.get("x")) : "step";
    const onZoom = (/** @type {import("../chart/line.js").Range} */ range) => {
      remember({ zoom: range ? range.map((each) => +each.toPrecision(6)).join("-") : null });
      this.reset.hidden = !range;
      if (this.axis === "step") Object.assign(this.apart, { range }).draw();
    };
    this.chart = new LineChart({
      label: "Training loss, smoothed",
      xLabel: this.axis,
      formatX: AXES[this.axis],
      format: (value) => number(value),
      signal,
      onZoom,
      height: 320,
    });
    this.apart = new LineChart({
      label: "Difference of the loss to the baseline",
      xLabel: "step",
      format: (value) => (value === null ? "–" : value.toFixed(4).replace("-", "−")),
      formatX: AXES.step,
      signal,
      always: 0,
      height: 200,
    });
    const zoom = query.get("zoom")?.split("-").map(Number);
    if (zoom?.length === 2 && zoom.every(Number.isFinite)) this.chart.range = [zoom[0], zoom[1]];
    if (this.axis === "step") this.apart.range = this.chart.range;
    this.reset = h(
      "button",
      { type: "button", class: "plain", hidden: !this.chart.range, onclick: () => this.chart.zoom(null) },
      "Whole curve",
    );
    this.verdict = h("div", { class: "verdicts" });
    this.band = h("p", { class: "muted" });
    this.detail = h("div", { class: "rest" });
    this.elements = [
      panel("Verdict", this.verdict),
      panel("Loss", this.#controls(), this.chart.element),
      panel("Difference to the baseline", this.apart.element, this.band),
      this.detail,
    ];
  }

  get isLive() {
    return this.jobs.some(({ job }) => ["running", "starting"].includes(job.state));
  }

  #controls() {
    const axis = h(
      "select",
      {
        "aria-label": "Horizontal axis",
        onchange: () => {
          this.axis = axis.value;
          Object.assign(this.chart.options, { xLabel: axis.value, formatX: AXES[axis.value] });
          remember({ x: axis.value === "step" ? null : axis.value });
          this.chart.zoom(null);
          this.draw();
        },
      },
      Object.keys(AXES).map((each) =>
        h("option", { value: each, selected: each === this.axis }, `by ${each === "time" ? "training time" : each}`),
      ),
    );
    const base = h(
      "select",
      {
        "aria-label": "Baseline",
        onchange: () => {
          this.base = this.jobs.find(({ job }) => job.id === base.value) ?? this.jobs[0];
          remember({ base: base.value });
          this.draw();
        },
      },
      this.jobs.map((each) => h("option", { value: each.job.id, selected: each === this.base }, `baseline: ${each.job.name}`)),
    );
    return h("div", { class: "controls" }, this.reset, base, axis);
  }

  draw() {
    const { jobs, base } = this;
    const line = (/** @type {Compared} */ { job }) => ({
      name: nameOf(job, jobs),
      color: hue(job.spec.precision.level),
      dash: dashAmong(
        jobs.map((each) => each.job.spec.precision.level),
        jobs.findIndex((each) => each.job.id === job.id),
      ),
    });
    this.chart.set(jobs.map((each) => ({ ...line(each), x: each.curve.along(this.axis), y: smoothed(each.curve) })));
    const others = jobs.filter((each) => each !== base);
    const seeds = spread(jobs, base);
    const apart = others.map((each) => ({ ...line(each), ...differences(each.curve, base.curve) }));
    this.apart.set(seeds ? [{ name: "seeds of the baseline", color: "--muted", ...seeds }, ...apart] : apart);
    fill(this.band, bandWords(jobs, base, Boolean(seeds)));
    fill(
      this.verdict,
      others.length
        ? others.map((each) => h("p", {}, badge(each.job.spec.precision.level), " ", judge(each, base, seeds)))
        : h("p", {}, "Add a second job: then this says what differs."),
    );
    detail(this.detail, jobs, base);
  }
}

/** @param {Compared[]} jobs @param {Compared} base @param {boolean} hasBand */
function bandWords(jobs, base, hasBand) {
  if (jobs.length < 2) return "";
  if (hasBand) return "The band is what the baseline's seeds differ by: a line inside of it is no worse than another seed.";
  return h(
    "span",
    {},
    `One seed of ${base.job.name} is here, so nothing says how much chance there is in a difference. `,
    h("a", { href: `/submit?from=${base.job.id}` }, "Clone it with another training.seed"),
    " and add that job.",
  );
}

/** Return a name that no other of these jobs has. @param {Compared["job"]} job @param {Compared[]} jobs */
function nameOf(job, jobs) {
  const isTwice = jobs.filter((each) => each.job.name === job.name).length > 1;
  return isTwice ? `${job.name} (${job.spec.precision.level}, seed ${job.spec.training.seed})` : job.name;
}
