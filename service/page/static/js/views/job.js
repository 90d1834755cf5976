/** One job: its state and what would help, its figures, its curves. What is below them comes after the first paint. */

import { Curve } from "../curve.js";
import { fill, h, say } from "../dom.js";
import { between, bytes, clock } from "../figures.js";
import { age, count, duration, number } from "../format.js";
import { badge, isOver, stateBadge } from "../levels.js";
import { readJob } from "../measured.js";
import { every, paced } from "../pace.js";
import { Curves } from "./curves.js";

/** @typedef {import("octet-types").Job} Job */
/** @typedef {import("octet-types").Measurements} Measurements */
/**
 * @typedef {{id: string, job: Job, curve: Curve, measured: Measurements | null, isGone: boolean, signal: AbortSignal}} Shown
 */
/**
 * @typedef {{draw: (shown: Shown) => void, receive?: (messages: import("../live.js").Message[]) => void, cursor?: string}} Part
 */

/** @param {import("../main.js").Place} place */
export async function show({ root, id, query, signal }) {
  const curve = new Curve(id, signal);
  const [[job, measured]] = await Promise.all([readJob(id, signal), curve.load()]);
  /** @type {Shown} */
  const shown = { id, job, curve, measured, isGone: false, signal };
  document.title = `${job.name} · Octet`;
  const [head, notice, facts] = [
    h("div", { class: "headline" }),
    h("div", { "aria-live": "polite" }),
    h("dl", { class: "facts" }),
  ];
  const curves = new Curves(shown, query);
  const [memory, rest] = [h("div", { class: "side" }), h("div", { class: "rest" })];
  root.append(head, notice, facts, h("div", { class: "split" }, curves.loss, memory), curves.speed, rest);
  /** @type {Part[]} */
  const parts = [
    { draw: () => drawHead(head, shown) },
    { draw: () => drawNotice(notice, shown) },
    { draw: () => drawFacts(facts, shown) },
    curves,
  ];
  const redraw = () => parts.forEach((part) => part.draw(shown));
  redraw();

  const [more, { watch }] = await Promise.all([import("./job-more.js"), import("../live.js")]);
  if (signal.aborted) return;
  parts.push(...more.parts(shown, { memory, rest, query }));
  redraw();
  const soon = paced(redraw, signal);
  const refresh = paced(async () => {
    const [fresh, last] = await readJob(id, signal).catch(() => [null, null]);
    if (!fresh) return;
    [shown.job, shown.measured] = [fresh, last];
    soon();
  }, signal);
  every(
    1,
    () => {
      if (!shown.isGone && !isOver(shown.job.state)) soon();
    },
    signal,
  );
  await watch(
    { jobs: [id], cursors: [curve.cursor, ...parts.flatMap((part) => part.cursor ?? [])] },
    (messages) => {
      for (const { kind, data } of messages) {
        if (kind === "points") for (const points of data) curve.add(points);
        if (kind === "row") take(shown, data);
        if (kind === "event") refresh();
        if (kind === "gone") shown.isGone = true;
      }
      for (const part of parts) part.receive?.(messages);
      soon();
    },
    signal,
  );
}

/** Take what a row has, before the whole job is read again. @param {Shown} shown @param {import("octet-types").Row} row */
function take(shown, row) {
  const { step, steps, loss, tokens_per_s, remaining_s } = row;
  const reported_at = new Date().toISOString();
  shown.job.state = row.state;
  if (step !== null && steps !== null) shown.job.progress = { step, steps, loss, tokens_per_s, remaining_s, reported_at };
}

/** @param {HTMLElement} head @param {Shown} shown */
function drawHead(head, { job, id, isGone }) {
  if (!head.childElementCount) {
    const { family } = job.spec.model;
    const under = h(
      "p",
      { class: "muted" },
      `${family} on ${job.spec.resources.pool} · `,
      h("code", {}, id),
      ` · ${job.tenant}`,
      ...membership(job.labels),
    );
    const buttons = h("div", { class: "buttons" });
    head.append(
      h("div", {}, h("h1", {}, job.name, " ", badge(job.spec.precision.level), " ", h("span", { class: "now" })), under),
      buttons,
    );
    import("../actions.js").then(({ actions, drawActions }) => {
      fill(buttons, actions(job));
      drawActions(head);
    });
  }
  /** @type {HTMLElement} */ (head.querySelector(".buttons")).hidden = isGone;
  const now = /** @type {HTMLElement} */ (head.querySelector(".now"));
  if (now.dataset.state !== job.state) {
    now.dataset.state = job.state;
    fill(now, stateBadge(job.state));
    import("../actions.js").then(({ drawActions }) => drawActions(head));
  }
}

/** Link to the comparison that a job is a child of. @param {Record<string, string>} labels @returns {(string | Node)[]} */
function membership({ comparison, arm, seed }) {
  if (!comparison?.startsWith("cmp_")) return [];
  const link = h("a", { href: `/comparisons/${encodeURIComponent(comparison)}` }, "a comparison");
  return [" · of ", link, `: arm ${arm}, seed ${seed}`];
}

/** Say why it waits or ended, and what would help. @param {HTMLElement} notice @param {Shown} shown */
function drawNotice(notice, { job, isGone }) {
  const [words, help] = isGone ? ["This job was deleted.", "What is shown is from before."] : reasons(job);
  if (notice.dataset.words === `${words} ${help}`) return;
  notice.dataset.words = `${words} ${help}`;
  fill(
    notice,
    words
      ? h(
          "div",
          { class: "notice", data: { state: job.state } },
          h("p", {}, words),
          help ? h("p", { class: "muted" }, help) : null,
        )
      : null,
  );
}

/** @param {Job} job @returns {[string, string]} */
function reasons(job) {
  if (job.queue) return [`Number ${job.queue.position} in pool ${job.spec.resources.pool}: ${job.queue.why}`, ""];
  if (job.state === "failed") {
    const hint = job.hint ?? "";
    return [`${job.reason?.replaceAll("_", " ")}: ${job.message ?? ""}`, job.message?.includes(hint) ? "" : hint];
  }
  if (job.desired_state === "yield" && !isOver(job.state))
    return ["It makes way: its last event says why.", "It saves a checkpoint, waits in the queue, and goes on from there."];
  if (job.state === "starting") return [`Attempt ${job.num_attempts} starts.`, "The bar below shows how far it is."];
  if (job.state === "pausing" || job.state === "cancelling") {
    const saves = job.desired_state === "cancel_now" ? "and saves nothing more" : "after a checkpoint";
    return [`It stops at the end of its step, ${saves}.`, ""];
  }
  if (job.state === "paused")
    return ["It holds no slots, and goes on from its newest checkpoint.", "Resume puts it into the queue."];
  return [job.message ?? "", job.hint ?? ""];
}

/** @param {HTMLElement} facts @param {Shown} shown */
function drawFacts(facts, { job, curve, measured }) {
  const { progress, summary } = job;
  const over = isOver(job.state);
  const losses = curve.evaluations.loss.filter((loss) => loss !== null);
  const best = losses.length ? losses.reduce((one, other) => Math.min(one, other)) : null;
  const when = job.finished_at
    ? `finished ${clock(job.finished_at)}`
    : job.started_at
      ? `started ${age(job.started_at)} ago`
      : `submitted ${age(job.created_at)} ago`;
  const memory = measured?.memory ?? null;
  const held = memory ? total(memory.held) : summary ? total(summary.memory_bytes) : null;
  const ratio = memory && held ? `${Math.round((100 * held) / total(memory.fp32))} % of fp32` : "weights, gradients, states";
  const rows = /** @type {[string, string, string][]} */ ([
    [
      "Step",
      progress ? count(progress.step) : "–",
      progress ? `of ${count(progress.steps)}` : job.spec.training.steps ? `of ${count(job.spec.training.steps)}` : "",
    ],
    ["Loss", number(progress?.loss), "training, last step"],
    ["Best evaluation", number(best), curve.evaluations.step.length ? `of ${curve.evaluations.step.length}` : "none yet"],
    ["Tokens/s", count(over && summary ? summary.tokens_per_s : progress?.tokens_per_s), over ? "mean" : "now"],
    over
      ? ["Took", duration(between(job.started_at ?? job.created_at, job.finished_at)), when]
      : ["Left", duration(progress?.remaining_s), when],
    ["Memory", bytes(held), held ? ratio : "after the first step"],
  ]);
  if (!facts.childElementCount)
    fill(
      facts,
      rows.map(() => h("div", {}, h("dt"), h("dd", {}, h("strong"), h("small")))),
    );
  rows.forEach(([name, value, note], place) => {
    const [term, strong, small] = facts.children[place].querySelectorAll("dt, strong, small");
    say(term, name);
    say(strong, value);
    say(small, note);
  });
}

/** @param {Record<string, number>} classes */
const total = (classes) => Object.values(classes).reduce((sum, each) => sum + each, 0);
