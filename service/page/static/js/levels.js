/** The looks of precision levels and of states. A level is a hue and a dash, always beside its name. */

import { h, svg } from "./dom.js";

const HUES = { fp32: "fp32", "fp16-amp": "16bit", "bf16-amp": "16bit", te: "engine", ao: "engine", auto: "auto" };
const DASHES = /** @type {Record<string, number[]>} */ ({
  "fp16-amp": [2, 3],
  ao: [6, 3],
  "O3-split": [6, 3],
  "O2-8bit": [6, 3],
  "O3-split-8bit": [2, 3],
});

/** Return the custom property of a level's colour. @param {string} level */
export function hue(level) {
  const family = /** @type {Record<string, string>} */ (HUES)[level] ?? /^O[123]/.exec(level)?.[0] ?? "16bit";
  return `--level-${family}`;
}

/** Return the dash of a level's lines; empty for a solid one. @param {string} level */
export const dash = (level) => DASHES[level] ?? [];

/** Build a level's name behind a piece of its line. @param {string} level */
export function badge(level) {
  const line = svg("line", {
    x1: 0,
    y1: 5,
    x2: 18,
    y2: 5,
    "stroke-width": 3,
    "stroke-dasharray": dash(level).join(" ") || null,
  });
  line.style.stroke = `var(${hue(level)})`;
  return h("span", { class: "level" }, svg("svg", { width: 18, height: 10, "aria-hidden": "true" }, line), level);
}

/** @type {Record<string, [string, string]>} */
const STATES = {
  queued: ["◷", "waiting"],
  starting: ["◌", "starting"],
  running: ["▶", "running"],
  pausing: ["◌", "pausing"],
  paused: ["‖", "paused"],
  cancelling: ["◌", "cancelling"],
  succeeded: ["✓", "succeeded"],
  failed: ["✕", "failed"],
  cancelled: ["–", "cancelled"],
  finished: ["✓", "finished"],
  too_wild: ["≈", "too wild"],
};

/** Return a state's word. @param {string} state */
export const word = (state) => STATES[state]?.[1] ?? state;

/** Build a state's mark and word. @param {string} state */
export function stateBadge(state) {
  return h(
    "span",
    { class: "state", data: { state } },
    h("span", { class: "sign", "aria-hidden": "true" }, STATES[state]?.[0] ?? "·"),
    word(state),
  );
}

/** @param {string} state */
export const isOver = (state) => state === "succeeded" || state === "failed" || state === "cancelled";
