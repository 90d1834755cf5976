/** The curves of a job: training loss with its smooth line and evaluations, and tokens per second with the waits for data. */

import { dash, hue } from "../levels.js";
import { LineChart } from "../chart/line.js";
import { smooth } from "../chart/smooth.js";
import { h, panel, say } from "../dom.js";
import { compact, percent } from "../figures.js";
import { count, duration, number } from "../format.js";
import { remember } from "../main.js";

/** @typedef {import("./job.js").Shown} Shown */

const AXES = /** @type {Record<string, [string, (value: number) => string]>} */ ({
  step: ["step", (value) => count(value)],
  tokens: ["tokens", compact],
  time: ["training time", (value) => duration(value)],
});

export class Curves {
  /** @param {Shown} shown @param {URLSearchParams} query */
  constructor(shown, query) {
    this.shown = shown;
    this.axis = AXES[query.get("x") ?? ""] ? /** @type {string} */ (query.get("x")) : "step";
    this.window = Number(query.get("smooth") ?? 10);
    const { signal } = shown;
    const [xLabel, formatX] = AXES[this.axis];
    const onZoom = (/** @type {import("../chart/line.js").Range} */ range) => {
      remember({ zoom: range ? range.map((each) => +each.toPrecision(6)).join("-") : null });
      for (const chart of [this.lossChart, this.speedChart]) {
        if (chart.range !== range) Object.assign(chart, { range }).draw();
      }
      this.reset.hidden = !range;
    };
    this.lossChart = new LineChart({
      label: "Loss",
      xLabel,
      formatX,
      format: (value) => number(value),
      signal,
      onZoom,
      height: 300,
    });
    this.speedChart = new LineChart({
      label: "Tokens per second",
      xLabel,
      formatX,
      format: (value) => (value === null ? "–" : compact(value)),
      signal,
      onZoom,
      fromZero: true,
      height: 150,
    });
    this.lossChart.isLog = query.get("log") === "1";
    const zoom = query.get("zoom")?.split("-").map(Number);
    this.lossChart.range = this.speedChart.range =
      zoom?.length === 2 && zoom.every(Number.isFinite) ? [zoom[0], zoom[1]] : null;
    this.reset = h(
      "button",
      { type: "button", class: "plain", hidden: !this.lossChart.range, onclick: () => this.lossChart.zoom(null) },
      "Whole curve",
    );
    this.loss = panel("Loss", this.#controls(), this.lossChart.element);
    this.waits = h("p", { class: "muted" });
    this.speed = panel("Speed", this.speedChart.element, this.waits);
  }

  #controls() {
    const log = h("input", {
      type: "checkbox",
      checked: this.lossChart.isLog,
      onchange: () => {
        this.lossChart.isLog = log.checked;
        remember({ log: log.checked ? "1" : null });
        this.lossChart.draw();
      },
    });
    const axis = h(
      "select",
      {
        "aria-label": "Horizontal axis",
        onchange: () => {
          this.axis = axis.value;
          for (const chart of [this.lossChart, this.speedChart])
            [chart.options.xLabel, chart.options.formatX] = AXES[this.axis];
          remember({ x: this.axis === "step" ? null : this.axis });
          this.lossChart.zoom(null);
          this.draw();
        },
      },
      Object.entries(AXES).map(([value, [name]]) => h("option", { value, selected: value === this.axis }, `by ${name}`)),
    );
    const window = h(
      "select",
      {
        "aria-label": "Smoothing",
        onchange: () => {
          this.window = Number(window.value);
          remember({ smooth: window.value === "10" ? null : window.value });
          this.draw();
        },
      },
      [0, 10, 50, 200, 1000].map((each) =>
        h("option", { value: each, selected: each === this.window }, each ? `smooth over ${each} steps` : "not smoothed"),
      ),
    );
    return h("div", { class: "controls" }, this.reset, axis, window, h("label", {}, log, " log"));
  }

  draw() {
    const { curve, job } = this.shown;
    const [x, color] = [curve.along(this.axis), hue(job.spec.precision.level)];
    const line = { color, x, dash: dash(job.spec.precision.level) };
    const raw = { ...line, dash: [], name: "training", y: curve.loss, low: curve.least, high: curve.greatest };
    const evaluation = {
      name: "evaluation",
      color: "--evaluation",
      x: curve.evaluatedAlong(this.axis),
      y: curve.evaluations.loss,
      dots: true,
    };
    const lines = this.window
      ? [
          { ...raw, faint: true },
          { ...line, name: "training, smoothed", y: smooth(curve.loss, curve.numSteps, this.window) },
        ]
      : [raw];
    this.lossChart.set(evaluation.x.length ? [...lines, evaluation] : lines);
    this.speedChart.set([{ name: "tokens/s", color: "--accent", x, y: curve.speeds() }]);
    const end = x.length - 1;
    say(this.waits, end < 0 ? "" : waitWords(curve.wait[end], curve.time[end]));
  }
}

/** @param {number} wait @param {number} time */
function waitWords(wait, time) {
  const share = time > 0 ? wait / time : 0;
  const advice =
    share > 0.1 ? " The data is the brake: more loader processes or tokens prepared by `octet data tokenize` help." : "";
  return `Of ${duration(time)} in steps, ${duration(wait)} (${percent(share, 1)}) waited for data.${advice}`;
}
