/** The jobs of a comparison: a row for each arm, a column for each seed, live. */

import { fill, h, mark, say } from "../dom.js";
import { percent } from "../figures.js";
import { isOver, stateBadge, word } from "../levels.js";
import { MOST } from "./compare-choose.js";
import { grid } from "./job-more.js";

/** @typedef {import("octet-types").ComparisonDetails} Details */
/** @typedef {import("octet-types").Child} Child */
/** @typedef {import("octet-types").Row} Row */

const NOISE = "noise";

export class Children {
  #shape = "";
  /** @type {Map<string, HTMLElement>} cells by job */
  #cells = new Map();
  /** @type {Map<string, Row>} */
  #rows = new Map();

  /** @param {Details} found */
  constructor(found) {
    this.found = found;
    this.element = h("div");
  }

  /** Take rows of jobs; true if one is new or in another state, so that the comparison is to be read. @param {Row[]} rows */
  take(rows) {
    const states = new Map(this.found.children.map(({ job_id, state }) => [job_id, state]));
    const isNews = rows.some(({ id, state }) => (this.#rows.get(id)?.state ?? states.get(id)) !== state);
    for (const row of rows) this.#rows.set(row.id, row);
    return isNews;
  }

  /** @param {Details} found */
  draw(found) {
    this.found = found;
    const { children } = found;
    const shape = children.map(({ job_id }) => job_id).join();
    if (shape !== this.#shape || !children.length) this.#build(children);
    this.#shape = shape;
    for (const child of children) this.#show(child);
  }

  /** @param {Child[]} children */
  #build(children) {
    if (!children.length)
      return fill(this.element, h("p", { class: "muted" }, "None yet: the dispatcher queues the first ones."));
    const seeds = [...new Set(children.map(({ seed }) => seed))].sort((one, other) => one - other);
    const known = children.map(({ arm }) => arm);
    const arms = [...this.found.report.arms.map(({ name }) => name), NOISE].filter((arm) => known.includes(arm));
    this.#cells.clear();
    const rows = arms.map((arm) => [
      arm,
      ...seeds.map((seed) => {
        const child = children.find((each) => each.arm === arm && each.seed === seed);
        if (!child) return "–";
        const cell = h("span", { class: "child" });
        this.#cells.set(child.job_id, cell);
        return cell;
      }),
    ]);
    const columns = ["Arm", ...seeds.map((seed) => `seed ${seed}`)];
    fill(this.element, grid("Jobs by arm and seed", columns, rows, 99), this.#curves(seeds, children));
  }

  /** Link to the curves of a seed's jobs. @param {number[]} seeds @param {Child[]} children */
  #curves(seeds, children) {
    const links = seeds.map((seed) => {
      const ids = children
        .filter((child) => child.seed === seed && child.arm !== NOISE && child.state)
        .map((child) => child.job_id);
      return [" ", h("a", { href: `/compare?jobs=${ids.slice(0, MOST).join(",")}` }, `seed ${seed}`)];
    });
    const noise = `${NOISE}: ${this.found.report.baseline} from a start changed by a thousandth. Curves over each other:`;
    return h("p", { class: "muted" }, noise, links.flat());
  }

  /** @param {Child} child */
  #show({ job_id, arm, seed, state, outcome }) {
    const cell = /** @type {HTMLElement} */ (this.#cells.get(job_id));
    const row = this.#rows.get(job_id);
    const now = state && row && !isOver(state) ? row.state : state;
    const ending = outcome === "diverged" || outcome === "left_out" ? outcome.replace("_", " ") : "";
    if (cell.dataset.state !== `${now}`) {
      cell.dataset.state = `${now}`;
      const name = `${arm}, seed ${seed}: ${now ? word(now) : "deleted"}`;
      const link = now ? h("a", { href: `/jobs/${job_id}`, "aria-label": name }, stateBadge(now)) : "deleted";
      fill(cell, link, h("small"));
    }
    const done = row?.steps && now && !isOver(now) && row.step !== null ? percent(row.step / row.steps) : "";
    const small = /** @type {HTMLElement} */ (cell.querySelector("small"));
    say(small, ending || done);
    mark(small, "class", ending ? "bad" : null);
  }
}
