/** Axes: a range of values onto pixels, linear or logarithmic, and round numbers along it. */

/**
 * @typedef {{least: number, most: number, isLog: boolean, ticks: number[],
 *   to: (value: number) => number, from: (pixel: number) => number}} Scale
 */

/**
 * Map least…most onto the pixels begin…end. A logarithmic scale needs values above zero, and is linear without them.
 * @param {number} least @param {number} most @param {number} begin @param {number} end
 * @param {{isLog?: boolean, num?: number}} [options] @returns {Scale}
 */
export function scale(least, most, begin, end, { isLog = false, num = 5 } = {}) {
  const log = isLog && least > 0;
  const [forth, back] = log ? [Math.log10, (/** @type {number} */ value) => 10 ** value] : [identity, identity];
  const [low, high] = [forth(least), forth(most)];
  const span = high - low || 1;
  return {
    least,
    most,
    isLog: log,
    to: (value) => begin + ((forth(value) - low) / span) * (end - begin),
    from: (pixel) => back(low + ((pixel - begin) / (end - begin || 1)) * span),
    ticks: log ? logTicks(least, most, num) : linearTicks(least, most, num),
  };
}

/** @param {number} value */
const identity = (value) => value;

/** Choose about so many round numbers in a range. @param {number} least @param {number} most @param {number} num */
export function linearTicks(least, most, num) {
  const rough = (most - least) / Math.max(1, num);
  if (!(rough > 0)) return [least];
  const power = 10 ** Math.floor(Math.log10(rough));
  const by = power * ([1, 2, 2.5, 5].find((each) => each * power >= rough) ?? 10);
  const ticks = [];
  for (let place = Math.ceil(least / by - 1e-9); place * by <= most + by * 1e-9; place++)
    ticks.push(+(place * by).toPrecision(12));
  return ticks;
}

/** @param {number} least @param {number} most @param {number} num */
function logTicks(least, most, num) {
  const decades = Math.log10(most / least);
  if (decades < 0.7) return linearTicks(least, most, num);
  const factors = decades > num ? [1] : decades > num / 2 ? [1, 3] : [1, 2, 5];
  const ticks = [];
  for (let power = Math.floor(Math.log10(least)); power <= Math.log10(most); power++) {
    for (const factor of factors) {
      const tick = +(factor * 10 ** power).toPrecision(12);
      if (tick >= least && tick <= most) ticks.push(tick);
    }
  }
  return ticks;
}
