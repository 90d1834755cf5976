/** Bars of bytes by class on one axis, so that a level's can be laid beside another's. */

import { h } from "../dom.js";
import { bytes, percent } from "../figures.js";

const FEW = 2;
const ORDER = ["weights", "master_weights", "gradients", "exp_avg", "exp_avg_sq"];
const HUES = /** @type {Record<string, string>} */ ({
  weights: "weights",
  master_weights: "master",
  gradients: "gradients",
  exp_avg: "exp-avg",
  exp_avg_sq: "exp-avg-sq",
});
const NAMES = /** @type {Record<string, string>} */ ({
  master_weights: "master weights",
  exp_avg: "first moments",
  exp_avg_sq: "second moments",
});

/**
 * Build bars with a table of what they show.
 * @param {{name: string, label?: HTMLElement, parts: Record<string, number>}[]} bars `label` stands in place of the name
 * @param {boolean} [isVersus] say how the first compares with the last
 */
export function stacks(bars, isVersus = false) {
  const classes = [...new Set([...ORDER, ...bars.flatMap(({ parts }) => Object.keys(parts))])].filter((name) =>
    bars.some(({ parts }) => parts[name]),
  );
  const totals = bars.map(({ parts }) => Object.values(parts).reduce((sum, each) => sum + each, 0));
  const most = Math.max(...totals);
  const drawn = bars.map(({ name, label, parts }, place) =>
    h(
      "div",
      { class: "stack" },
      h("span", {}, label ?? name),
      h(
        "div",
        { class: "pile" },
        classes.map((each) => piece(each, (parts[each] ?? 0) / most)),
      ),
      h("b", {}, bytes(totals[place])),
    ),
  );
  const last = totals.length - 1;
  const saved =
    isVersus && last > 0 ? h("p", { class: "verdict" }, comparison(totals[0], totals[last], bars[last].name)) : null;
  const table = h(
    "table",
    { class: "classes" },
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        h("th", { scope: "col" }, h("span", { class: "hidden" }, "Class")),
        bars.map(({ name }) => h("th", { scope: "col", class: "figure" }, name)),
      ),
    ),
    h(
      "tbody",
      {},
      classes.map((each) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, swatch(each), NAMES[each] ?? each.replaceAll("_", " ")),
          bars.map(({ parts }) => h("td", { class: "figure" }, bytes(parts[each] ?? 0))),
        ),
      ),
    ),
  );
  const wide = { class: "scroll", tabindex: 0, role: "region", "aria-label": "Bytes by class" };
  return h("div", { class: "stacks" }, saved, drawn, bars.length > FEW ? h("div", wide, table) : table);
}

/** @param {number} here @param {number} there @param {string} name */
function comparison(here, there, name) {
  const ratio = here / there;
  return ratio < 1
    ? `${percent(1 - ratio)} less than ${name}`
    : ratio > 1
      ? `${percent(ratio - 1)} more than ${name}`
      : `As much as ${name}`;
}

/** @param {string} each @param {number} share */
function piece(each, share) {
  const element = h("i", { title: NAMES[each] ?? each });
  element.style.width = `${100 * share}%`;
  element.style.background = color(each);
  return element;
}

/** @param {string} each */
function swatch(each) {
  const element = h("i", { class: "swatch" });
  element.style.background = color(each);
  return element;
}

/** @param {string} each */
const color = (each) => `var(--memory-${HUES[each] ?? "other"})`;
