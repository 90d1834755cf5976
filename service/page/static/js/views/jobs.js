/** All jobs: pools, filters, and the table. It answers whether a job runs, and if not, why it waits. */

import { ask } from "../api.js";
import { spark } from "../chart/spark.js";
import { fill, h, mark, problem, say } from "../dom.js";
import { age, count, duration, number } from "../format.js";
import { Jobs } from "../joblist.js";
import { badge, isOver, stateBadge } from "../levels.js";
import { go, remember } from "../main.js";
import { Rows } from "../rows.js";

/** @typedef {import("octet-types").Row} Job */
/** @typedef {Awaited<ReturnType<typeof build>>} View */

const COLUMNS = ["", "Name", "Level", "State", "Progress", "Loss", "Best eval.", "Curve", "Tokens/s", "Left", "Age"];
const GROUPS = {
  "": "All",
  live: "Running",
  waiting: "Waiting",
  succeeded: "Succeeded",
  failed: "Failed",
  cancelled: "Cancelled",
};

/** @param {import("../main.js").Place} place */
export async function show(place) {
  const view = build(place);
  await view.jobs.reload();
  // What follows the first paint: keys, the choice for a comparison, changes as they happen.
  import("./jobs-more.js").then((more) => {
    if (!place.signal.aborted) more.enliven(view, place);
  });
}

/** @param {import("../main.js").Place} place */
function build({ root, query, signal }) {
  const jobs = new Jobs(query, signal);
  const chosen = new Set(query.getAll("chosen"));
  const at = { index: -1 };
  const head = h(
    "div",
    { class: "head", role: "row" },
    COLUMNS.map((name) => h("div", { role: "columnheader" }, name || h("span", { class: "hidden" }, "Choose"))),
  );
  /** @type {Rows<Job>} */
  const rows = new Rows({ make: () => rowOf(chosen, at), item: (index) => jobs.at(index), signal });
  const table = h(
    "div",
    { class: "table", role: "table", "aria-label": "Jobs" },
    h("div", { role: "rowgroup" }, head),
    rows.element,
  );
  const pools = h("div", { class: "pools" });
  const note = h("div", { class: "empty", "aria-live": "polite" });
  root.append(h("h1", { class: "hidden" }, "Jobs"), pools, filters(jobs, signal), table, note);
  jobs.onChange = () => {
    rows.resize(jobs.total);
    mark(table, "aria-rowcount", String(jobs.total + 1));
    table.hidden = !jobs.total;
    if (jobs.error || jobs.total) fill(note, jobs.error ? problem(jobs.error) : null);
    else import("./jobs-more.js").then(({ nothing }) => fill(note, nothing(jobs)));
  };
  drawPools(pools, signal);
  return { root, jobs, chosen, at, rows, table, pools };
}

/**
 * @param {Set<string>} chosen @param {{index: number}} at the row that the keys are at
 * @returns {import("../rows.js").Row<Job>}
 */
function rowOf(chosen, at) {
  const box = h("input", { type: "checkbox" });
  const [link, below, level, state, why] = [h("a"), h("small"), h("div", { role: "cell" }), h("span"), h("small")];
  const [done, steps, curve] = [h("i"), h("span"), spark()];
  const figures = ["loss", "evaluation", "speed", "left", "age"].map((name) =>
    h("div", { role: "cell", class: `figure ${name}` }),
  );
  const [loss, evaluation, speed, left, since] = figures;
  const bar = h("span", { class: "bar" }, done);
  const element = h(
    "div",
    { class: "row", role: "row" },
    h("div", { role: "cell" }, box),
    h("div", { role: "cell", class: "name" }, link, below),
    level,
    h("div", { role: "cell", class: "status" }, state, why),
    h("div", { role: "cell", class: "progress" }, bar, steps),
    loss,
    evaluation,
    h("div", { role: "cell", class: "curve" }, curve.element),
    speed,
    left,
    since,
  );
  let id = "";
  let shown = ["", ""];
  box.addEventListener("change", () => {
    box.checked ? chosen.add(id) : chosen.delete(id);
  });
  element.addEventListener("click", (event) => {
    if (event.target instanceof Element && !event.target.closest("a, input") && !String(getSelection())) go(`/jobs/${id}`);
  });
  const update = (/** @type {Job | undefined} */ row, /** @type {number} */ index) => {
    element.classList.toggle("loading", !row);
    element.classList.toggle("current", index === at.index);
    if (!row) return;
    id = row.id;
    box.checked = chosen.has(id);
    mark(box, "aria-label", `Choose ${row.name}`);
    mark(link, "href", `/jobs/${id}`);
    say(link, row.name);
    say(below, row.tenant === "default" ? row.pool : `${row.pool} · ${row.tenant}`);
    if (shown[0] !== row.level) fill(level, badge(row.level));
    if (shown[1] !== row.state) state.replaceChildren(stateBadge(row.state));
    shown = [row.level, row.state];
    say(why, row.reason?.replaceAll("_", " ") ?? row.why ?? "");
    mark(why, "title", row.why);
    done.style.width = `${row.steps ? (100 * (row.step ?? 0)) / row.steps : 0}%`;
    mark(done, "data-state", row.state);
    say(steps, row.step == null ? "–" : `${count(row.step)} / ${count(row.steps)}`);
    say(loss, number(row.loss));
    say(evaluation, number(row.best_evaluation_loss));
    say(speed, count(row.tokens_per_s));
    say(left, isOver(row.state) ? "–" : duration(row.remaining_s));
    say(since, age(row.created_at));
    curve.draw(row.sparkline);
    curve.element.style.color = `var(--curve)`;
  };
  return { element, update };
}

/** @param {Jobs} jobs @param {AbortSignal} signal */
function filters(jobs, signal) {
  let waiting = 0;
  const apply = (/** @type {Record<string, string>} */ changes) => {
    Object.assign(jobs.filters, changes);
    remember(changes);
    for (const button of groups.children)
      mark(button, "aria-pressed", String(button.getAttribute("value") === jobs.filters.state));
    clearTimeout(waiting);
    waiting = setTimeout(() => jobs.reload(), "q" in changes ? 150 : 0);
  };
  const search = h("input", {
    type: "search",
    id: "q",
    placeholder: "Search names",
    "aria-label": "Search",
    value: jobs.filters.q,
    oninput: () => apply({ q: search.value }),
  });
  const groups = h(
    "div",
    { class: "groups", role: "group", "aria-label": "State" },
    Object.entries(GROUPS).map(([value, name]) =>
      h(
        "button",
        { type: "button", value, "aria-pressed": String(value === jobs.filters.state), onclick: () => apply({ state: value }) },
        name,
      ),
    ),
  );
  const level = select("level", "Any level", jobs, apply);
  const pool = select("pool", "Any pool", jobs, apply);
  listed("/v1/levels", level, signal);
  listed("/v1/pools", pool, signal);
  return h(
    "div",
    { class: "filters" },
    search,
    groups,
    level,
    pool,
    h("a", { class: "button main", href: "/submit" }, "Submit a job"),
  );
}

/**
 * @param {"level" | "pool"} name @param {string} any @param {Jobs} jobs
 * @param {(changes: Record<string, string>) => void} apply
 */
function select(name, any, jobs, apply) {
  const present = jobs.filters[name];
  const element = h(
    "select",
    { "aria-label": name === "level" ? "Level" : "Pool", onchange: () => apply({ [name]: element.value }) },
    h("option", { value: "" }, any),
    present && h("option", { value: present, selected: true }, present),
  );
  return element;
}

/**
 * Fill a choice with the names that the server lists.
 * @param {string} path @param {HTMLSelectElement} element @param {AbortSignal} signal
 */
async function listed(path, element, signal) {
  const { data } = await ask(path, { signal }).catch(() => ({ data: [] }));
  const names = data
    .map((/** @type {{name: string}} */ each) => each.name)
    .filter((/** @type {string} */ name) => name !== element.value);
  element.append(...names.map((/** @type {string} */ name) => h("option", { value: name }, name)));
}

/** Show the pools' slots and queues. @param {HTMLElement} element @param {AbortSignal} signal */
export async function drawPools(element, signal) {
  try {
    const { data } = await ask("/v1/pools", { signal });
    fill(element, data.map(poolCard));
  } catch (error) {
    if (!signal.aborted && !element.childElementCount) fill(element, problem(error));
  }
}

/** @param {import("octet-types").Pool} pool */
function poolCard(pool) {
  const fill = h("i");
  fill.style.width = `${(100 * pool.slots_used) / pool.slots}%`;
  const waiting = pool.jobs_queued
    ? h("strong", { class: "waits" }, `${count(pool.jobs_queued)} waiting`)
    : h("span", {}, "none waiting");
  return h(
    "a",
    { class: "pool", href: `/?pool=${pool.name}` },
    h("strong", {}, pool.name),
    h("span", { class: "bar" }, fill),
    h("span", {}, `${count(pool.slots_used)} of ${count(pool.slots)} slots`),
    waiting,
  );
}
