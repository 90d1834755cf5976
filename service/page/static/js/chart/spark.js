/** A curve as small as a word. */

import { mark, svg } from "../dom.js";

const [WIDTH, HEIGHT] = [72, 22];

/** Build an empty one; `draw` gives it numbers. */
export function spark() {
  const path = svg("path", { fill: "none", stroke: "currentColor", "stroke-width": 1.5, "stroke-linejoin": "round" });
  const element = svg(
    "svg",
    { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, height: HEIGHT, "aria-hidden": "true" },
    path,
  );
  return { element, draw: (/** @type {(number | null)[]} */ values) => mark(path, "d", line(values)) };
}

/** @param {(number | null)[]} values */
function line(values) {
  const known = /** @type {number[]} */ (values.filter((value) => value !== null));
  if (known.length < 2) return "";
  const [least, most] = [Math.min(...known), Math.max(...known)];
  const x = (/** @type {number} */ place) => (1 + (place / (values.length - 1)) * (WIDTH - 2)).toFixed(1);
  const y = (/** @type {number} */ value) => (HEIGHT - 2 - ((value - least) / (most - least || 1)) * (HEIGHT - 4)).toFixed(1);
  let pen = "M";
  return values
    .map((value, place) => {
      if (value === null) return ((pen = "M"), "");
      const piece = `${pen}${x(place)} ${y(value)}`;
      pen = "L";
      return piece;
    })
    .join("");
}
