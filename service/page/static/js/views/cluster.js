/** The cluster: is the service well, which alerts fire, pools, the queue in order with reasons, what runs where. */

import { address, ask } from "../api.js";
import { fill, h, panel, problem } from "../dom.js";
import { bytes, percent } from "../figures.js";
import { age, count } from "../format.js";
import { badge, stateBadge } from "../levels.js";
import { watch } from "../live.js";
import { every, paced } from "../pace.js";
import { grid } from "./job-more.js";

/** @typedef {import("octet-types").Row} Row */

/** @param {import("../main.js").Place} place */
export async function show({ root, signal }) {
  const titles = ["Service", "Alerts", "Pools", "Queue", "Running"];
  const [health, alerts, pools, queue, running] = titles.map((title) => panel(title));
  root.append(h("h1", {}, "Cluster"), health, alerts, pools, queue, running);
  const parts = /** @type {[HTMLElement, () => Promise<(Node | string)[]>][]} */ ([
    [health, () => healthOf(signal)],
    [alerts, () => alertsOf(signal)],
    [pools, () => poolsOf(signal)],
    [queue, () => queueOf(signal)],
    [running, () => runningOf(signal)],
  ]);
  const refresh = () =>
    Promise.all(
      parts.map(async ([element, read]) => {
        const title = /** @type {HTMLElement} */ (element.querySelector("h2"));
        try {
          fill(element, title, await read());
        } catch (error) {
          if (!signal.aborted) fill(element, title, problem(error));
        }
      }),
    );
  await refresh();
  const soon = paced(refresh, signal);
  every(10, soon, signal);
  watch({ list: "state=queued&state=starting&state=running&state=pausing&state=cancelling&limit=100" }, soon, signal);
}

/** @param {AbortSignal} signal */
async function healthOf(signal) {
  const ready = await ask("/readyz", { signal }).then(
    () => null,
    (error) => error,
  );
  if (ready?.status === 0 || signal.aborted) throw ready;
  /** @type {{data: import("octet-types").Loop[]}} */
  const { data } = await ask("/v1/loops", { signal });
  const names = (/** @type {boolean} */ is_stalled) =>
    data
      .filter((loop) => loop.is_stalled === is_stalled)
      .map((loop) => loop.name)
      .join(", ");
  const words = ready
    ? problem(ready)
    : h("p", { class: "good" }, "✓ Ready: the database answers, a dispatcher leads, its loops make progress.");
  return [
    words,
    names(true) && h("p", { class: "bad" }, `Loops of the dispatcher that make no progress: ${names(true)}.`),
    names(false) && h("p", { class: "muted" }, `Loops of the dispatcher that run: ${names(false)}.`),
    h(
      "p",
      { class: "muted" },
      "Metrics for Prometheus: ",
      h("a", { href: "/metrics" }, "/metrics"),
      ". The API: ",
      h("a", { href: "/docs" }, "/docs"),
      ".",
    ),
  ];
}

/** @param {AbortSignal} signal */
async function alertsOf(signal) {
  /** @type {{data: import("octet-types").Alert[], has_more: boolean}} */
  const { data, has_more } = await ask("/v1/alerts", { signal });
  if (!data.length) return [h("p", { class: "muted" }, "No alert fires.")];
  const rows = data.map((alert) => [
    h("b", { class: alert.severity === "critical" ? "bad" : null }, alert.severity),
    alert.job_id ? h("a", { href: `/jobs/${alert.job_id}` }, alert.summary) : alert.summary,
    age(alert.since),
    alert.runbook.startsWith("http") ? h("a", { href: alert.runbook }, "runbook") : h("code", {}, alert.runbook),
  ]);
  const more = has_more ? h("p", { class: "muted" }, `More than ${count(data.length)} fire; these are the first.`) : "";
  return [grid("Alerts", ["Severity", "Fires because", "For", "To do"], rows, 9), more];
}

/** @param {AbortSignal} signal */
async function poolsOf(signal) {
  /** @type {{data: import("octet-types").Pool[]}} */
  const { data } = await ask("/v1/pools", { signal });
  const rows = data.map((pool) => {
    const bar = h("i");
    bar.style.width = `${(100 * pool.slots_used) / pool.slots}%`;
    return [
      h("a", { href: `/?pool=${pool.name}` }, pool.name),
      pool.accelerator,
      h("span", { class: "used" }, h("span", { class: "bar" }, bar), `${count(pool.slots_used)} of ${count(pool.slots)}`),
      count(pool.jobs_live),
      count(pool.jobs_queued),
      pool.slots_present === null ? "not seen yet" : `${count(pool.slots_present)} slots`,
      bytes(pool.memory_per_device_bytes),
      percent(pool.measured_to_planned ?? null, 1),
      percent(pool.step_time_to_planned ?? null),
      count(pool.threads_per_worker),
    ];
  });
  const columns = [
    "Pool",
    "Kind",
    "Slots",
    "Live jobs",
    "Waiting",
    "Nodes offer",
    "Memory a device",
    "Measured of planned",
    "Step of planned",
    "Threads a worker",
  ];
  const meaning =
    "Measured of planned: bytes that jobs took, of those that their plans said; the median, once ten have succeeded. " +
    "Step of planned: the same of a step's time, of the middle of its predicted range.";
  return [grid("Pools", columns, rows, 3), h("p", { class: "muted" }, meaning)];
}

/** @param {AbortSignal} signal */
async function queueOf(signal) {
  /** @type {{data: Row[], total: number}} */
  const { data, total } = await ask(address("/v1/rows", { state: "queued", sort: "created", limit: 100 }), { signal });
  if (!total) return [h("p", { class: "muted" }, "Nothing waits.")];
  const sorted = data.sort((one, other) =>
    one.pool < other.pool ? -1 : one.pool > other.pool ? 1 : (one.position ?? 0) - (other.position ?? 0),
  );
  const rows = sorted.map((row) => [
    h("span", {}, `${row.pool} ${row.position ?? "–"}`),
    h("a", { href: `/jobs/${row.id}` }, row.name),
    badge(row.level),
    row.why ?? "",
    `${age(row.created_at)}`,
  ]);
  const more =
    total > data.length
      ? h("p", { class: "muted" }, `${count(total - data.length)} more: `, h("a", { href: "/?state=waiting" }, "all that wait"))
      : "";
  return [grid("Queue", ["Place", "Job", "Level", "Why it waits", "Waits for"], rows, 9), more];
}

/** @param {AbortSignal} signal */
async function runningOf(signal) {
  /** @type {{data: Row[], total: number}} */
  const { data, total } = await ask(
    address("/v1/rows", { state: ["starting", "running", "pausing", "cancelling"], limit: 100 }),
    {
      signal,
    },
  );
  if (!total) return [h("p", { class: "muted" }, "Nothing runs.")];
  const rows = data.map((row) => [
    h("a", { href: `/jobs/${row.id}` }, row.name),
    badge(row.level),
    stateBadge(row.state),
    row.pool,
    row.step === null ? "–" : `${count(row.step)} of ${count(row.steps)}`,
    count(row.tokens_per_s),
  ]);
  return [grid("Running", ["Job", "Level", "State", "Pool", "Step", "Tokens/s"], rows, 4)];
}
