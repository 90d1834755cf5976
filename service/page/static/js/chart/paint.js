/** Draw axes and lines of a chart on its canvas. */

import { decimate } from "./decimate.js";

/** @typedef {import("./line.js").Series & {line: [number, number | null][]}} Drawn */
/** @typedef {{left: number, right: number, top: number, bottom: number}} Margin */
/**
 * @typedef {{x: import("./scale.js").Scale, y: import("./scale.js").Scale, cursor: number | null,
 *   dragFrom: number | null, margin: Margin, xLabel: string, format: (value: number | null) => string,
 *   formatX: (value: number) => string}} Frame
 */

/** @param {HTMLCanvasElement} canvas @param {Drawn[]} series @param {Frame} frame */
export function paint(canvas, series, frame) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const ratio = devicePixelRatio;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
  }
  const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const colors = colorsOf(canvas);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = `11px ${getComputedStyle(canvas).fontFamily}`;
  if (series.length) axes(pen, frame, width, height, colors);
  pen.save();
  pen.beginPath();
  pen.rect(frame.margin.left, 0, width - frame.margin.left - frame.margin.right + 4, height - frame.margin.bottom + 1);
  pen.clip();
  for (const each of series) if (each.low && each.high) band(pen, each, frame, width, colors);
  for (const each of series) line(pen, each, frame, colors);
  pointed(pen, series, frame, height, colors);
  pen.restore();
}

/** Resolve custom properties to colours of the present theme. @param {HTMLElement} element @returns {Colors} */
function colorsOf(element) {
  const known = new Map();
  return (name) => {
    if (!known.has(name)) {
      element.style.color = `var(${name})`;
      known.set(name, getComputedStyle(element).color);
    }
    return known.get(name);
  };
}

/** @typedef {(name: string) => string} Colors */
/**
 * @param {CanvasRenderingContext2D} pen @param {Frame} frame @param {number} width @param {number} height
 * @param {Colors} colors
 */
function axes(pen, { x, y, margin, format, formatX, xLabel }, width, height, colors) {
  pen.lineWidth = 1;
  pen.setLineDash([]);
  pen.strokeStyle = colors("--line");
  pen.fillStyle = colors("--muted");
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const bottom = height - margin.bottom;
  for (const tick of y.ticks) {
    const at = Math.round(y.to(tick)) + 0.5;
    if (at < margin.top - 4 || at > bottom + 1) continue;
    stroke(pen, margin.left, at, width - margin.right, at);
    pen.fillText(axisNumber(tick, format), margin.left - 8, at);
  }
  pen.textBaseline = "alphabetic";
  pen.textAlign = "center";
  const name = pen.measureText(xLabel).width;
  for (const tick of x.ticks) {
    const at = x.to(tick);
    if (at < margin.left - 1 || at > width - margin.right - name - 24) continue;
    pen.fillText(formatX(tick), Math.max(at, margin.left + 4), bottom + 17);
  }
  pen.textAlign = "right";
  pen.fillText(xLabel, width - margin.right, bottom + 17);
}

/**
 * Write a number beside an axis without the zeros that a legend wants.
 * @param {number} tick @param {(value: number | null) => string} format
 */
const axisNumber = (tick, format) =>
  format(tick)
    .replace(/(\.\d*?)0+(?=\D|$)/, "$1")
    .replace(/\.(?=\D|$)/, "");

/**
 * @param {CanvasRenderingContext2D} pen @param {Drawn} series @param {Frame} frame @param {number} width
 * @param {Colors} colors
 */
function band(pen, { x: at, low, high, color }, { x, y }, width, colors) {
  const edge = (/** @type {any} */ values) =>
    decimate(at, values, x.least, x.most, width).filter(([, value]) => value !== null && (!y.isLog || value > 0));
  const [under, over] = [edge(low), edge(high).reverse()];
  pen.globalAlpha = 0.18;
  pen.fillStyle = colors(color);
  pen.beginPath();
  for (const [place, value] of [...under, ...over]) pen.lineTo(x.to(place), y.to(/** @type {number} */ (value)));
  pen.fill();
  pen.globalAlpha = 1;
}

/** @param {CanvasRenderingContext2D} pen @param {Drawn} series @param {Frame} frame @param {Colors} colors */
function line(pen, { line: points, color, dash = [], faint = false, dots = false }, { x, y }, colors) {
  pen.strokeStyle = pen.fillStyle = colors(color);
  pen.globalAlpha = faint ? 0.5 : 1;
  pen.lineWidth = faint ? 1 : 2;
  pen.lineJoin = "round";
  pen.setLineDash(dash);
  pen.beginPath();
  let isDown = false;
  let alone = null;
  for (const [at, value] of points) {
    if (value === null || (y.isLog && value <= 0)) {
      isDown = false;
      continue;
    }
    const [left, top] = [x.to(at), y.to(value)];
    if (isDown) pen.lineTo(left, top);
    else pen.moveTo(left, top);
    alone = isDown ? null : [left, top];
    isDown = true;
    if (dots && points.length < 200) {
      pen.rect(left - 2, top - 2, 4, 4);
      pen.moveTo(left, top);
    }
  }
  pen.stroke();
  pen.setLineDash([]);
  if (alone) pen.fillRect(alone[0] - 2.5, alone[1] - 2.5, 5, 5);
  pen.globalAlpha = 1;
}

/**
 * Draw the cursor and the range that is being dragged.
 * @param {CanvasRenderingContext2D} pen @param {Drawn[]} series @param {Frame} frame @param {number} height
 * @param {Colors} colors
 */
function pointed(pen, series, { x, y, cursor, dragFrom, margin }, height, colors) {
  if (cursor === null) return;
  const at = Math.round(x.to(cursor)) + 0.5;
  if (dragFrom !== null) {
    pen.globalAlpha = 0.12;
    pen.fillStyle = colors("--accent");
    pen.fillRect(Math.min(at, x.to(dragFrom)), margin.top, Math.abs(at - x.to(dragFrom)), height - margin.top - margin.bottom);
    pen.globalAlpha = 1;
  }
  pen.lineWidth = 1;
  pen.strokeStyle = colors("--muted");
  stroke(pen, at, margin.top, at, height - margin.bottom);
  for (const { line: points, color, faint } of series) {
    const nearest = faint
      ? null
      : points.reduce((best, each) => (Math.abs(each[0] - cursor) < Math.abs(best[0] - cursor) ? each : best), points[0]);
    if (!nearest || nearest[1] === null) continue;
    pen.fillStyle = colors(color);
    pen.beginPath();
    pen.arc(x.to(nearest[0]), y.to(nearest[1]), 3.5, 0, 7);
    pen.fill();
  }
}

/** @param {CanvasRenderingContext2D} pen @param {number} x1 @param {number} y1 @param {number} x2 @param {number} y2 */
function stroke(pen, x1, y1, x2, y2) {
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x2, y2);
  pen.stroke();
}
