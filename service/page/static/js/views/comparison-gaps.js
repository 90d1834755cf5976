/** The gaps of a comparison's arms to its baseline at each evaluation, with their intervals, in one measure at a time. */

import { LineChart } from "../chart/line.js";
import { fill, h, panel } from "../dom.js";
import { percent } from "../figures.js";
import { count, number } from "../format.js";
import { hue } from "../levels.js";
import { remember } from "../main.js";
import { dashAmong } from "./compare-more.js";

/** @typedef {import("octet-types").ComparisonDetails} Details */

/** Write a gap with its sign. @param {number | null | undefined} gap @param {boolean} isRelative */
export const signed = (gap, isRelative) => {
  if (gap == null) return "–";
  const size = isRelative ? percent(Math.abs(gap), 3) : number(Math.abs(gap));
  return `${gap < 0 ? "−" : gap ? "+" : ""}${size}`;
};

/** Draw a part where what it shows has changed. @param {HTMLElement} element @param {any} value @param {() => any[]} build */
export function part(element, value, build) {
  const words = JSON.stringify(value);
  if (element.dataset.words === words) return;
  element.dataset.words = words;
  fill(element, ...build());
}

/**
 * Return the level of an arm, whose name begins with it where levels are compared.
 * @param {Details} found @param {string} name
 */
export function levelOf({ spec }, name) {
  const first = name.split(", ")[0];
  return spec.levels?.some((level) => level === first) ? first : (spec.job.precision?.level ?? "");
}

const HUES = ["--accent", "--evaluation", "--memory-weights", "--memory-exp-avg", "--curve"];
const DASHES = [[], [6, 3], [2, 3]];

/** Choose the look of each arm's line: its level's where levels are compared. @param {Details} found @param {string[]} names */
function looks(found, names) {
  const levels = names.map((name) => levelOf(found, name));
  return names.map((_, place) =>
    found.spec.levels?.length
      ? { color: hue(levels[place]), dash: dashAmong(levels, place) }
      : { color: HUES[place % HUES.length], dash: DASHES[Math.floor(place / HUES.length) % DASHES.length] },
  );
}

export class Gaps {
  /** @type {Details | null} */
  #found = null;
  #isRelative = true;

  /** @param {URLSearchParams} query @param {AbortSignal} signal */
  constructor(query, signal) {
    this.measure = query.get("measure") ?? "loss";
    this.select = h("select", { "aria-label": "Measure", onchange: () => this.#choose() });
    this.reset = h("button", { type: "button", class: "plain", onclick: () => this.chart.zoom(null) }, "Whole curve");
    this.chart = new LineChart({
      label: "Gap to the baseline",
      xLabel: "step",
      formatX: (value) => count(value),
      format: (value) => signed(value, this.#isRelative),
      signal,
      always: 0,
      height: 260,
      onZoom: (range) => {
        remember({ zoom: range ? range.map((each) => +each.toPrecision(6)).join("-") : null });
        this.reset.hidden = !range;
      },
    });
    const zoom = query.get("zoom")?.split("-").map(Number);
    if (zoom?.length === 2 && zoom.every(Number.isFinite)) this.chart.range = [zoom[0], zoom[1]];
    this.reset.hidden = !this.chart.range;
    this.chart.empty = "once the first seed of an arm is over";
    const meaning = "The band is the 95 % interval of that point alone. Above zero, a loss is worse.";
    this.element = panel(
      "Gap to the baseline at each evaluation",
      h("div", { class: "controls" }, this.reset, this.select),
      this.chart.element,
      h("p", { class: "muted" }, meaning),
    );
  }

  /** @param {Details} found */
  draw(found) {
    this.#found = found;
    this.#plot();
  }

  #choose() {
    this.measure = this.select.value;
    remember({ measure: this.measure === "loss" ? null : this.measure });
    this.#plot();
  }

  #plot() {
    const found = /** @type {Details} */ (this.#found);
    const arms = found.report.arms.filter((arm) => !arm.is_baseline);
    const measures = [...new Set(["loss", this.measure, ...arms.flatMap(({ gaps }) => gaps.map(({ measure }) => measure))])];
    part(this.select, measures, () =>
      measures.map((each) => h("option", { value: each, selected: each === this.measure }, each.replaceAll("_", " "))),
    );
    const styles = looks(
      found,
      arms.map(({ name }) => name),
    );
    const lines = arms.map(({ name, gaps }, place) => {
      const points = gaps.filter(({ measure }) => measure === this.measure);
      if (points.length) this.#isRelative = points[0].is_relative;
      const edge = (/** @type {number} */ side) =>
        points.map(({ gap, half_width: half }) => (half == null ? null : gap + side * half));
      return {
        name,
        ...styles[place],
        dots: true,
        x: points.map(({ step }) => step),
        y: points.map(({ gap }) => gap),
        low: edge(-1),
        high: edge(1),
      };
    });
    const steps = lines.flatMap(({ x }) => x);
    const { tolerance } = found.report;
    const limit = { name: "tolerance", color: "--muted", dash: [2, 4], x: [Math.min(...steps), Math.max(...steps)] };
    const isLimited = this.measure === "loss" && steps.length > 0;
    this.chart.set([...lines, ...(isLimited ? [{ ...limit, y: [tolerance, tolerance] }] : [])]);
  }
}
