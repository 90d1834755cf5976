/** The lower part of a comparison: bytes, speed, and the fields of the specs that differ. */

import { stacks } from "../chart/stack.js";
import { fill, h, panel } from "../dom.js";
import { bytes } from "../figures.js";
import { count } from "../format.js";
import { badge, dash } from "../levels.js";
import { heldBy, speedOf } from "../judge.js";
import { grid } from "./job-more.js";

/** @typedef {import("./compare.js").Compared} Compared */

/** Draw it where something changed. @param {HTMLElement} element @param {Compared[]} jobs @param {Compared} base */
export function detail(element, jobs, base) {
  const speeds = jobs.map((each) => Math.round(speedOf(each) ?? 0));
  const words = JSON.stringify([base.job.id, speeds, jobs.map(heldBy)]);
  if (element.dataset.words === words) return;
  element.dataset.words = words;
  fill(element, h("div", { class: "halves" }, memory(jobs), speed(jobs, speeds)), fields(jobs));
}

/** Return a dash that no other line of its level has. @param {string[]} levels of all lines @param {number} place */
export function dashAmong(levels, place) {
  const alike = levels.slice(0, place).filter((each) => each === levels[place]).length;
  return alike ? [1 + 2 * alike, 3] : dash(levels[place]);
}

/** @param {Compared[]} jobs */
function memory(jobs) {
  const known = jobs.filter((each) => heldBy(each));
  const bars = known.map((each) => ({
    name: each.job.spec.precision.level,
    label: h("span", {}, badge(each.job.spec.precision.level), h("small", {}, perParameter(each))),
    parts: heldBy(each) ?? {},
  }));
  return panel("Memory by class", bars.length ? stacks(bars) : h("p", { class: "muted" }, "Counted after the first step."));
}

/** @param {Compared} one */
function perParameter(one) {
  const parameters = one.measured?.num_parameters ?? one.job.summary?.num_parameters;
  const held = Object.values(heldBy(one) ?? {}).reduce((sum, each) => sum + each, 0);
  return parameters ? ` ${(held / parameters).toFixed(1)} bytes a parameter` : ` ${bytes(held)}`;
}

/** @param {Compared[]} jobs @param {number[]} speeds */
function speed(jobs, speeds) {
  const most = Math.max(...speeds, 1);
  return panel(
    "Tokens per second, without the first step",
    jobs.map(({ job }, place) => {
      const bar = h("i");
      bar.style.width = `${(100 * speeds[place]) / most}%`;
      return h(
        "div",
        { class: "velocity" },
        badge(job.spec.precision.level),
        h("span", { class: "bar" }, bar),
        h("b", {}, speeds[place] ? count(speeds[place]) : "–"),
      );
    }),
  );
}

/** Build the table of what differs in the specs. @param {Compared[]} jobs */
function fields(jobs) {
  const flat = jobs.map(({ job }) => flatten(job.spec));
  const paths = [...new Set(flat.flatMap((each) => Object.keys(each)))]
    .filter((path) => path !== "name" && new Set(flat.map((each) => each[path])).size > 1)
    .sort();
  const rows = paths.map((path) => [h("code", {}, path), ...flat.map((each) => each[path] ?? "–")]);
  return panel(
    "Fields that differ",
    rows.length
      ? grid("Fields that differ", ["Field", ...jobs.map(({ job }) => job.name)], rows, 9)
      : h("p", { class: "muted" }, jobs.length > 1 ? "None: the specs are the same." : "One job alone."),
  );
}

/** Write a document as one value for each path. @param {any} value @param {string} [path] @returns {Record<string, string>} */
export function flatten(value, path = "") {
  if (value === null || typeof value !== "object") return { [path]: value === null ? "–" : String(value) };
  if (Array.isArray(value)) return { [path]: JSON.stringify(value) };
  return Object.assign({}, ...Object.entries(value).map(([name, each]) => flatten(each, path ? `${path}.${name}` : name)));
}
