/** Plans in words: what a stored job was predicted to take, and a table of what a job would take at each level. */

import { h } from "../dom.js";
import { bytes, percent } from "../figures.js";
import { count } from "../format.js";
import { badge } from "../levels.js";
import { grid } from "./job-more.js";

/** @typedef {import("octet-types").PlanRow} PlanRow */

const VERDICTS = { yes: "it fits", tight: "it may not fit", no: "it does not fit", unknown: "not known if it fits" };
const FITS = { yes: "fits", tight: "may not", no: "no", unknown: "states do" };

/**
 * Write bytes between a lower and an upper bound. A row without a peak has the states alone.
 * @param {{lower_bytes?: number | null, upper_bytes?: number | null, peak_bytes?: number | null}} row
 */
const bounds = ({ lower_bytes: lower, upper_bytes: upper, peak_bytes: peak }) =>
  lower == null ? "–" : peak == null || upper == null ? bytes(lower) : `${bytes(lower)} to ${bytes(upper)}`;

/** Say what the plan of a stored job was, and how it held. @param {import("octet-types").Job} job @returns {HTMLElement[]} */
export function planWords({ plan, measured_to_planned: ratio }) {
  if (!plan) return [];
  const chosen = plan.asked_level !== "auto" ? "" : plan.level ? `auto chose ${plan.level}; ` : "auto chose no level; ";
  const what = plan.peak_bytes == null ? "states alone" : "a peak of";
  const room = `${what} ${bounds(plan)} on devices of ${bytes(plan.memory_per_device_bytes)}: ${VERDICTS[plan.verdict]}`;
  const largest = plan.largest_micro_batch == null ? "" : `, micro-batches up to ${count(plan.largest_micro_batch)} surely do`;
  const words = plan.lower_bytes == null ? `${chosen}${VERDICTS[plan.verdict]}` : `${chosen}${room}${largest}`;
  const sure = plan.remedies?.length ? plan.remedies : (plan.possible_remedies ?? []);
  return [
    h("p", { class: "plan" }, h("strong", {}, "Planned: "), `${words}.`, plan.reason ? ` ${plan.reason}.` : ""),
    ratio == null ? null : h("p", { class: "plan" }, h("strong", {}, "Measured: "), `${percent(ratio, 1)} of the plan.`),
    sure.length && plan.verdict !== "yes"
      ? h(
          "p",
          { class: "muted" },
          `${plan.remedies?.length ? "It would surely" : "It may"} fit with one of: ${sure.join(", ")}.`,
        )
      : null,
  ].filter((each) => each !== null);
}

/** @param {string | null | undefined} words */
const sentence = (words = "") => `${words?.slice(0, 1).toUpperCase()}${words?.slice(1)}.`;

/** Show what a job would take at each level. @param {import("octet-types").Plan} plan @returns {HTMLElement[]} */
export function planTable(plan) {
  const hasRoom = plan.rows.some((row) => fitOf(row, plan.pool));
  const rows = plan.rows.map((row) => levelRow(row, plan.pool, hasRoom));
  const columns = ["Level", "Bytes of a rank", ...(hasRoom ? ["Fits", "Micro-batch"] : [])];
  const reasons = [
    ...new Set(plan.rows.map(({ reason }) => reason).filter((reason) => reason && !/^only states/.test(reason))),
  ];
  const changes = (plan.changes ?? []).map(({ change, level }) => change ?? `precision.level ${level}`);
  return [
    plan.chosen_level ? h("p", { class: "good" }, `auto chooses ${plan.chosen_level} in pool ${plan.pool}.`) : null,
    grid("Plan by level", columns, rows, 1),
    changes.length ? h("p", { class: "muted" }, `It would fit pool ${plan.pool} with one of: ${changes.join(", ")}.`) : null,
    h("p", { class: "muted" }, meaning(plan, hasRoom), ...reasons.map((reason) => ` ${sentence(reason)}`)),
  ].filter((each) => each !== null);
}

/** @param {import("octet-types").Plan} plan @param {boolean} hasRoom */
const meaning = ({ pool, micro_batch_size: size, workers }, hasRoom) =>
  `Of the rank that holds most, of ${workers}, in micro-batches of ${size}: the step's peak from its lower to its upper bound` +
  ` where that was traced (bold), else the states alone.${hasRoom ? "" : ` Pool ${pool} states no memory of its devices.`}`;

/** @param {PlanRow} row @param {string} pool */
const fitOf = (row, pool) => row.fits?.find((fit) => fit.pool === pool);

/** @param {PlanRow} row @param {string} pool @param {boolean} hasRoom @returns {(string | Node)[]} */
function levelRow(row, pool, hasRoom) {
  const fit = fitOf(row, pool);
  const size = row.peak_bytes == null ? bounds(row) : h("strong", {}, bounds(row));
  const most = fit?.largest_micro_batch == null ? "–" : count(fit.largest_micro_batch);
  const verdict = fit ? h("span", { class: fit.verdict === "no" ? "bad" : null }, FITS[fit.verdict]) : "–";
  return [badge(row.level), size, ...(hasRoom ? [verdict, most] : [])];
}
