/** A chart of lines on a canvas. Its legend has the values under the cursor, or the last ones; its label says the same. */

import { fill, h, mark } from "../dom.js";
import { short } from "../figures.js";
import { decimate, firstAt } from "./decimate.js";
import { paint } from "./paint.js";
import { scale } from "./scale.js";

/**
 * @typedef {object} Series
 * @property {string} name
 * @property {string} color a custom property
 * @property {number[]} x rising
 * @property {(number | null)[]} y
 * @property {(number | null)[]} [low] the band around the line
 * @property {(number | null)[]} [high]
 * @property {number[]} [dash]
 * @property {boolean} [faint] drawn behind, without a legend
 * @property {boolean} [dots]
 */
/** @typedef {[number, number] | null} Range */

const MARGIN = { left: 54, right: 14, top: 12, bottom: 26 };

export class LineChart {
  /** @type {Series[]} */
  series = [];
  /** @type {Range} */
  range = null;
  isLog = false;
  /** @type {number | null} */
  cursor = null;
  /** @type {number | null} */
  dragFrom = null;
  isDrawn = false;
  empty = "after the first step";

  /**
   * @param {{label: string, xLabel: string, signal: AbortSignal, format?: (value: number | null) => string,
   *   formatX?: (value: number) => string,
   *   onZoom?: (range: Range) => void, fromZero?: boolean, always?: number, height?: number}} options
   */
  constructor(options) {
    this.options = { format: short, formatX: short, onZoom: () => {}, fromZero: false, height: 260, ...options };
    this.canvas = h("canvas", {
      tabindex: 0,
      role: "img",
      "aria-label": `${options.label}: ${this.empty}`,
      "data-chart": options.label,
    });
    this.canvas.style.height = `${this.options.height}px`;
    this.legend = h("div", { class: "legend" });
    this.element = h("figure", { class: "chart" }, this.legend, this.canvas);
    const { signal } = options;
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    addEventListener("octet-theme", () => this.draw(), { signal });
    const on = (/** @type {string} */ name, /** @type {(event: any) => void} */ run) => this.canvas.addEventListener(name, run);
    on("pointermove", (event) => this.#point(event));
    on("pointerleave", () => this.#put(null));
    on("pointerdown", (event) => {
      if (event.pointerType !== "touch") this.dragFrom = this.#at(event);
    });
    on("pointerup", (event) => this.#release(event));
    on("dblclick", () => this.zoom(null));
    on("keydown", (event) => this.#press(event));
    on("blur", () => this.#put(null));
  }

  /** Show other lines. They are copied: a curve that grows meanwhile is drawn when it is set again. @param {Series[]} series */
  set(series) {
    this.series = series.map((each) => ({
      ...each,
      x: [...each.x],
      y: [...each.y],
      low: each.low?.slice(),
      high: each.high?.slice(),
    }));
    this.draw();
  }

  /** Show a range of x, or all. @param {Range} range */
  zoom(range) {
    this.range = range;
    this.options.onZoom(range);
    this.draw();
  }

  draw() {
    if (this.isDrawn) return;
    this.isDrawn = true;
    requestAnimationFrame(() => {
      this.isDrawn = false;
      this.#draw();
    });
  }

  #draw() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width) return;
    const series = this.series.filter(({ x }) => x.length);
    const [from, to] = this.range ?? this.#whole(series);
    this.x = scale(from, to, MARGIN.left, width - MARGIN.right, { num: Math.max(2, width / 110) });
    const drawn = series.map((each) => ({ ...each, line: decimate(each.x, each.y, from, to, width) }));
    const [least, most] = this.#heights(drawn, from, to, width);
    this.y = scale(least, most, height - MARGIN.bottom, MARGIN.top, { isLog: this.isLog, num: height / 45 });
    paint(this.canvas, drawn, {
      x: this.x,
      y: this.y,
      cursor: this.cursor,
      dragFrom: this.dragFrom,
      margin: MARGIN,
      ...this.options,
    });
    this.#say();
  }

  /** @param {Series[]} series @returns {[number, number]} */
  #whole(series) {
    const [from, to] = [Math.min(...series.map(({ x }) => x[0])), Math.max(...series.map(({ x }) => x[x.length - 1]))];
    return Number.isFinite(from) ? [from, to > from ? to : from + 1] : [0, 1];
  }

  /**
   * @param {(Series & {line: [number, number | null][]})[]} drawn @param {number} from @param {number} to
   * @param {number} width @returns {[number, number]}
   */
  #heights(drawn, from, to, width) {
    let [least, most] = [Infinity, -Infinity];
    const see = (/** @type {number | null} */ value) => {
      if (value === null || (this.isLog && value <= 0)) return;
      least = Math.min(least, value);
      most = Math.max(most, value);
    };
    for (const { line, x, low, high } of drawn) {
      for (const [at, value] of line) if (at >= from && at <= to) see(value);
      for (const edge of [low, high])
        if (edge) for (const [at, value] of decimate(x, edge, from, to, width)) if (at >= from && at <= to) see(value);
    }
    if (!Number.isFinite(least)) return [0, 1];
    if (this.options.always !== undefined) see(this.options.always);
    if (this.options.fromZero) return [0, most * 1.08 || 1];
    if (this.isLog) return [least * 0.95, most * 1.05];
    const room = (most - least) * 0.06 || Math.abs(most) * 0.05 || 1;
    return [least - room, most + room];
  }

  /** Write the values at the cursor, or the last ones, into the legend and the label. */
  #say() {
    const { label, xLabel, format, formatX } = this.options;
    const shown = this.series.filter(({ faint }) => !faint).map((each) => ({ ...each, value: this.valueAt(each) }));
    const at = this.cursor ?? Math.max(...shown.map(({ x }) => x[x.length - 1] ?? -Infinity));
    const where = Number.isFinite(at) ? `${xLabel} ${formatX(at)}` : this.empty;
    fill(
      this.legend,
      shown.map(({ name, color, dash, value, dots }) => {
        const line = h("i", { class: dots && !dash ? "dot" : dash?.length ? "dashed" : "solid" });
        line.style.color = `var(${color})`;
        return h("span", { class: "entry" }, line, name, h("b", {}, format(value)));
      }),
      h("span", { class: "where" }, where),
    );
    const values = shown.map(({ name, value }) => `${name} ${format(value)}`).join(", ");
    const words = Number.isFinite(at)
      ? `${label}. At ${where}: ${values}${this.isLog ? ", logarithmic axis" : ""}`
      : `${label}: ${where}`;
    mark(this.canvas, "aria-label", words);
  }

  /** Return a line's value at the cursor, or its last. @param {Series} series @returns {number | null} */
  valueAt({ x, y }) {
    if (!x.length) return null;
    if (this.cursor === null) return y[y.length - 1];
    const after = firstAt(x, this.cursor);
    const before = Math.max(0, after - 1);
    const place = after >= x.length || this.cursor - x[before] < x[after] - this.cursor ? before : after;
    return y[place];
  }

  /** @param {MouseEvent} event */
  #at(event) {
    return this.x ? this.#inside(this.x.from(event.offsetX)) : 0;
  }

  /** Keep a place inside the range that is shown. @param {number} at */
  #inside(at) {
    const { least = 0, most = 1 } = this.x ?? {};
    return Math.min(most, Math.max(least, at));
  }

  /** Put the cursor at the step that is nearest. @param {MouseEvent} event */
  #point(event) {
    this.#put(this.#nearest(this.#at(event)));
  }

  /** @param {number} at */
  #nearest(at) {
    const main = this.series.find(({ x, faint }) => x.length && !faint);
    if (!main) return null;
    const after = Math.min(firstAt(main.x, at), main.x.length - 1);
    const before = Math.max(0, after - 1);
    return at - main.x[before] < main.x[after] - at ? main.x[before] : main.x[after];
  }

  /** @param {number | null} at */
  #put(at) {
    if (at === null) this.dragFrom = null;
    this.cursor = at;
    this.draw();
  }

  /** @param {PointerEvent} event */
  #release(event) {
    const [from, to] = [this.dragFrom ?? 0, this.#at(event)].sort((one, other) => one - other);
    const isDrag = this.dragFrom !== null && this.x && Math.abs(this.x.to(to) - this.x.to(from)) > 6;
    this.dragFrom = null;
    if (isDrag) this.zoom([from, to]);
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    const main = this.series.find(({ x, faint }) => x.length && !faint);
    if (!main || !this.x) return;
    const { least, most } = this.x;
    const place = this.cursor === null ? main.x.length - 1 : firstAt(main.x, this.cursor);
    const by = event.shiftKey ? 10 : 1;
    const to = { ArrowLeft: place - by, ArrowRight: place + by, Home: 0, End: main.x.length - 1 }[event.key];
    if (to !== undefined) this.#put(this.#inside(main.x[Math.min(main.x.length - 1, Math.max(0, to))]));
    else if (event.key === "+" || event.key === "-") {
      const [center, factor] = [this.cursor ?? (least + most) / 2, event.key === "+" ? 0.5 : 2];
      const [from, end] = this.#whole(this.series);
      const range = /** @type {[number, number]} */ ([
        Math.max(from, center - (center - least) * factor),
        Math.min(end, center + (most - center) * factor),
      ]);
      this.zoom(range[0] <= from && range[1] >= end ? null : range);
    } else if (event.key === "Escape") this.zoom(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
