/** One comparison: what it says so far, its arms, their gaps at each evaluation, and its jobs by arm and seed. */

import { comparisonActions, drawActions } from "../actions.js";
import { ask } from "../api.js";
import { stacks } from "../chart/stack.js";
import { fill, h, panel } from "../dom.js";
import { percent } from "../figures.js";
import { count, duration, number } from "../format.js";
import { badge, stateBadge, word } from "../levels.js";
import { watch } from "../live.js";
import { every, paced } from "../pace.js";
import { Children } from "./comparison-children.js";
import { Gaps, levelOf, part, signed } from "./comparison-gaps.js";
import { variedOf } from "./comparisons.js";
import { grid } from "./job-more.js";

/** @typedef {import("octet-types").ComparisonDetails} Details */
/** @typedef {import("octet-types").ArmReport} ArmReport */

/** @type {Record<ArmReport["answer"], [string, string]>} */
const ANSWERS = {
  yes: ["✓", "succeeded"],
  no: ["✕", "failed"],
  open: ["?", "queued"],
  failed: ["✕", "failed"],
  baseline: ["·", "cancelled"],
};
const COLUMNS = ["Arm", "Answer", "Loss gap", "95 %", "Seeds", "Bytes/param", "Saves", "Tokens/s", "Time"];

/** @param {import("../main.js").Place} place */
export async function show({ root, id, query, signal }) {
  const path = `/v1/comparisons/${encodeURIComponent(id)}`;
  /** @type {Details} */
  let found = await ask(path, { signal });
  document.title = `${found.name} · Octet`;
  const view = new View(found, query, signal, () => refresh());
  root.append(...view.elements);
  view.draw(found);
  const soon = paced(() => view.draw(found), signal);
  const refresh = paced(async () => {
    found = await ask(path, { signal }).catch(() => found);
    soon();
  }, signal);
  every(
    5,
    () => {
      if (!found.finished_at) refresh();
    },
    signal,
  );
  const list = `label=comparison:${id}&limit=100`;
  watch(
    { list },
    (messages) => {
      for (const message of messages) {
        if (message.kind !== "rows" || message.list !== list) continue;
        if (view.children.take(message.changed)) refresh();
      }
      soon();
    },
    signal,
  );
}

class View {
  /**
   * @param {Details} found @param {URLSearchParams} query @param {AbortSignal} signal
   * @param {() => void} refresh read it again
   */
  constructor(found, query, signal, refresh) {
    this.found = found;
    this.now = h("span", { class: "now" });
    const buttons = h("div", { class: "buttons" }, comparisonActions(found, refresh));
    const { spec, tenant } = found;
    const facts = `${variedOf(found)} · up to ${spec.seeds} seeds · tolerance ${percent(spec.tolerance, 2)} · `;
    const under = h("p", { class: "muted" }, facts, h("code", {}, found.id), ` · ${tenant}`);
    this.head = h("div", { class: "headline" }, h("div", {}, h("h1", {}, found.name, " ", this.now), under), buttons);
    this.notice = h("div", { "aria-live": "polite" });
    this.verdict = h("div", { "aria-live": "polite" });
    this.arms = h("div");
    this.memory = h("div", { class: "rest" });
    this.gaps = new Gaps(query, signal);
    this.children = new Children(found);
    this.elements = [
      this.head,
      this.notice,
      panel("Verdict", this.verdict),
      panel("Arms", this.arms),
      this.gaps.element,
      this.memory,
      panel("Jobs by arm and seed", this.children.element),
    ];
  }

  /** @param {Details} found */
  draw(found) {
    const { state, message, report } = found;
    this.found = found;
    if (this.now.dataset.state !== state) {
      this.now.dataset.state = state;
      fill(this.now, stateBadge(state));
      drawActions(this.head);
    }
    part(this.notice, [state, message], () => [
      message ? h("div", { class: "notice", data: { state } }, h("p", {}, `${word(state)}: ${message}`)) : null,
    ]);
    part(this.verdict, report, () => verdicts(found));
    part(this.arms, report.arms, () => [
      grid(
        "Arms",
        COLUMNS,
        report.arms.map((arm) => this.#row(arm)),
        2,
      ),
    ]);
    part(
      this.memory,
      report.arms.map((arm) => arm.memory_bytes),
      () => this.#memory(),
    );
    this.gaps.draw(found);
    this.children.draw(found);
  }

  /** @param {string} name */
  #badge(name) {
    const level = levelOf(this.found, name);
    return name.startsWith(level) ? h("span", {}, badge(level), name.slice(level.length)) : name;
  }

  /** @param {ArmReport} arm @returns {(string | Node)[]} */
  #row(arm) {
    return [
      this.#badge(arm.name),
      answerBadge(arm.answer),
      signed(arm.gap, true),
      arm.half_width == null ? "–" : `± ${percent(arm.half_width, 3)}`,
      count(arm.seeds.length),
      number(arm.bytes_per_parameter, 2),
      percent(arm.memory_saving),
      count(arm.tokens_per_s),
      duration(arm.train_time_s),
    ];
  }

  #memory() {
    const arms = this.found.report.arms.filter((arm) => Object.values(arm.memory_bytes).some(Boolean));
    const bars = arms.map((arm) => ({ name: arm.name, label: h("span", {}, this.#badge(arm.name)), parts: arm.memory_bytes }));
    return bars.length ? [panel("Memory by class", stacks(bars))] : [];
  }
}

/** @param {ArmReport["answer"]} answer */
const answerBadge = (answer) =>
  h(
    "span",
    { class: "state", data: { state: ANSWERS[answer][1] } },
    h("span", { class: "sign", "aria-hidden": "true" }, ANSWERS[answer][0]),
    answer,
  );

/** Write the sentences: a verdict for each arm, the noise of the setting, what was not compared. @param {Details} found */
function verdicts({ report, message }) {
  const { noise, not_calm: wild, left_out: lost, baseline, arms } = report;
  const judged = arms.filter((arm) => !arm.is_baseline);
  const more = [
    noise == null ? "" : `Noise: a start changed by a thousandth moves ${baseline}'s loss by ${percent(noise, 3)}.`,
    wild && !message?.includes(wild) ? `Stopped: ${wild}` : "",
    ...lost.map((line) => `Left out: ${line}.`),
  ].filter(Boolean);
  return [
    h(
      "div",
      { class: "verdicts answers" },
      judged.map(({ answer, words }) => h("p", {}, answerBadge(answer), h("span", {}, `${words}.`))),
    ),
    ...more.map((line) => h("p", { class: "muted" }, line)),
  ];
}
