/** A plan in words: what a stored job was predicted to take. */

import { h } from "../dom.js";
import { bytes, percent, short } from "../figures.js";
import { count } from "../format.js";

const VERDICTS = { yes: "it fits", tight: "it may not fit", no: "it does not fit", unknown: "not known if it fits" };

/**
 * Write bytes between a lower and an upper bound. A row without a peak has the states alone.
 * @param {{lower_bytes?: number | null, upper_bytes?: number | null, peak_bytes?: number | null}} row
 */
export const bounds = ({ lower_bytes: lower, upper_bytes: upper, peak_bytes: peak }) =>
  lower == null ? "–" : peak == null || upper == null ? bytes(lower) : `${bytes(lower)} to ${bytes(upper)}`;

/** Say what the plan of a stored job was, and how it held. @param {import("octet-types").Job} job @returns {HTMLElement[]} */
export function planWords({ plan, summary, measured_to_planned: ratio }) {
  if (!plan) return [];
  const chosen = plan.asked_level !== "auto" ? "" : plan.level ? `auto chose ${plan.level}; ` : "auto chose no level; ";
  const what = plan.peak_bytes == null ? "states alone" : "a peak of";
  const room = `${what} ${bounds(plan)} on devices of ${bytes(plan.memory_per_device_bytes)}: ${VERDICTS[plan.verdict]}`;
  const largest = plan.largest_micro_batch == null ? "" : `, micro-batches up to ${count(plan.largest_micro_batch)} surely do`;
  const words = plan.lower_bytes == null ? `${chosen}${VERDICTS[plan.verdict]}` : `${chosen}${room}${largest}`;
  const step = plan.predicted_step;
  const measured = summary?.step_time_s == null ? "" : `, measured ${short(summary.step_time_s)} s`;
  const sure = plan.remedies?.length ? plan.remedies : (plan.possible_remedies ?? []);
  return [
    h("p", { class: "plan" }, h("strong", {}, "Planned: "), `${words}.`, plan.reason ? ` ${plan.reason}.` : ""),
    ratio == null ? null : h("p", { class: "plan" }, h("strong", {}, "Measured: "), `${percent(ratio, 1)} of the plan.`),
    step == null
      ? null
      : h(
          "p",
          { class: "plan" },
          h("strong", {}, "A step: "),
          `planned ${short(step.least_s)} to ${short(step.most_s)} s${measured}.`,
        ),
    sure.length && plan.verdict !== "yes"
      ? h(
          "p",
          { class: "muted" },
          `${plan.remedies?.length ? "It would surely" : "It may"} fit with one of: ${sure.join(", ")}.`,
        )
      : null,
  ].filter((each) => each !== null);
}
