/** What a comparison says: smoothed curves, their difference to a baseline, the band of its seeds, and a verdict in words. */

import { firstAt } from "./chart/decimate.js";
import { smooth } from "./chart/smooth.js";
import { bytes, percent } from "./figures.js";
import { count } from "./format.js";

/** @typedef {import("./views/compare.js").Compared} Compared */
/** @typedef {import("./curve.js").Curve} Curve */
/** @typedef {{x: number[], y: (number | null)[], low: number[], high: number[]}} Band */

/** Smooth a curve over a twentieth of its steps. @param {Curve} curve */
export const smoothed = (curve) => smooth(curve.loss, curve.numSteps, Math.max(5, curve.last / 20));

/** Read a curve at a step between its points. @param {number[]} steps @param {(number | null)[]} values @param {number} step */
function valueAt(steps, values, step) {
  const after = firstAt(steps, step);
  if (after >= steps.length) return null;
  const [before, value] = [Math.max(0, after - 1), values[after]];
  const earlier = values[before];
  if (steps[after] === step || value === null || earlier === null || before === after) return value;
  return earlier + ((value - earlier) * (step - steps[before])) / (steps[after] - steps[before]);
}

/** Subtract a baseline from a curve where both have steps. @param {Curve} curve @param {Curve} base */
export function differences(curve, base) {
  const [own, others] = [smoothed(curve), smoothed(base)];
  const y = curve.step.map((step, place) => {
    const [value, other] = [own[place], valueAt(base.step, others, step)];
    return value === null || other === null ? null : value - other;
  });
  const end = firstAt(curve.step, base.last + 1);
  return { x: curve.step.slice(0, end), y: y.slice(0, end) };
}

/** Find the jobs that are the baseline with another seed. @param {Compared[]} jobs @param {Compared} base */
function seedsOf(jobs, base) {
  return jobs.filter(
    (each) =>
      each === base || (each.job.spec.training.seed !== base.job.spec.training.seed && withoutSeed(each) === withoutSeed(base)),
  );
}

/** @param {Compared} one */
function withoutSeed({ job }) {
  const { name: _name, labels: _labels, priority: _priority, training, ...others } = job.spec;
  return JSON.stringify([others, { ...training, seed: 0 }]);
}

/**
 * Compute how far the baseline's seeds lie apart; null for one seed.
 * @param {Compared[]} jobs @param {Compared} base @returns {Band | null}
 */
export function spread(jobs, base) {
  const seeds = seedsOf(jobs, base);
  if (seeds.length < 2) return null;
  const curves = seeds.map(({ curve }) => differences(curve, base.curve));
  const x = base.curve.step.filter((step) => curves.every(({ x: steps }) => step <= (steps[steps.length - 1] ?? 0)));
  const at = x.map((step) => curves.map(({ x: steps, y }) => valueAt(steps, y, step) ?? 0));
  return { x, y: x.map(() => 0), low: at.map((values) => Math.min(...values)), high: at.map((values) => Math.max(...values)) };
}

/**
 * Say what a job costs and gains against the baseline.
 * @param {Compared} one @param {Compared} base @param {Band | null} seeds
 */
export function judge(one, base, seeds) {
  const step = Math.min(one.curve.last, base.curve.last);
  if (!step) return `${one.job.name} has no step to compare yet.`;
  const { loss, kind, at } = difference(one, base, step);
  const end = seeds ? seeds.x.length - 1 : -1;
  const chance = seeds && end >= 0 ? Math.max(Math.abs(seeds.low[end]), Math.abs(seeds.high[end])) : null;
  const size = `${Math.abs(loss).toFixed(4)} (${percent(Math.abs(loss) / at.base, 1)})`;
  const sign = loss > 0 ? "above" : "below";
  const inside =
    chance === null
      ? ""
      : Math.abs(loss) <= chance
        ? ", no more than its seeds differ"
        : loss > 0
          ? ", more than its seeds differ"
          : "";
  const what = `the ${kind} loss of ${one.job.name} is ${size} ${sign} ${base.job.name}${inside}`;
  return `At step ${count(at.step)} ${what}.${memoryWords(one, base)}${speedWords(one, base)}`;
}

/**
 * Take the last evaluation that both have, or else the smoothed training loss.
 * @param {Compared} one @param {Compared} base @param {number} step
 */
function difference(one, base, step) {
  const [own, other] = [one.curve.evaluations, base.curve.evaluations];
  const shared = own.step.findLast(
    (each, place) =>
      each <= step && other.step.includes(each) && own.loss[place] !== null && other.loss[other.step.indexOf(each)] !== null,
  );
  if (shared !== undefined) {
    const [here, there] = [own.loss[own.step.indexOf(shared)] ?? 0, other.loss[other.step.indexOf(shared)] ?? 0];
    return { loss: here - there, kind: "evaluation", at: { step: shared, base: there } };
  }
  const [here, there] = [one, base].map(({ curve }) => valueAt(curve.step, smoothed(curve), step) ?? NaN);
  return { loss: here - there, kind: "smoothed training", at: { step, base: there } };
}

/** Return the bytes that a job holds by class; null before it is known. @param {Compared} one */
export const heldBy = ({ job, measured }) => measured?.memory?.held ?? job.summary?.memory_bytes ?? null;

/** @param {Compared} one @param {Compared} base */
function memoryWords(one, base) {
  const [own, other] = [heldBy(one), heldBy(base)].map(
    (held) => held && Object.values(held).reduce((sum, each) => sum + each, 0),
  );
  if (!own || !other) return "";
  return ` It holds ${bytes(own)}, ${percent(own / other)} of ${bytes(other)}.`;
}

/** Return a job's mean speed without its first step. @param {Compared} one */
export function speedOf({ curve }) {
  const end = curve.step.length - 1;
  if (end < 1) return null;
  return (curve.tokens[end] - curve.tokens[0]) / (curve.time[end] - curve.time[0]);
}

/** @param {Compared} one @param {Compared} base */
function speedWords(one, base) {
  const [own, other] = [speedOf(one), speedOf(base)];
  return own && other ? ` It trains ${(own / other).toFixed(2)} times as many tokens a second.` : "";
}
