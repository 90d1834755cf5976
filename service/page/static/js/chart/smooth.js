/** Smooth a curve by straight lines that are fitted around each point, with weights that fall exponentially to both sides. */

/**
 * A constant stays constant and a line a line, so neither end is drawn towards the past, the future or zero. Missing values are
 * passed over. The sums of a fit are carried from point to point, so the time does not depend on the window.
 * @param {(number | null)[]} values @param {number[]} weights steps that each value stands for @param {number} window in steps
 * @returns {(number | null)[]}
 */
export function smooth(values, weights, window) {
  const [forth, back] = [sums(values, weights, window), sums(values.toReversed(), weights.toReversed(), window)];
  const last = values.length - 1;
  return values.map((value, place) => {
    if (value === null) return null;
    const [before, after, own] = [forth[place], back[last - place], weights[place]];
    const [s0, s1, s2] = [before[0] + after[0] - own, after[1] - before[1], before[2] + after[2]];
    const [t0, t1] = [before[3] + after[3] - own * value, after[4] - before[4]];
    const determinant = s0 * s2 - s1 * s1;
    return determinant > 1e-9 * s0 * s0 ? (s2 * t0 - s1 * t1) / determinant : t0 / s0;
  });
}

/**
 * Sum weights, weights × distance, weights × distance², weights × value and weights × distance × value up to each place.
 * @param {(number | null)[]} values @param {number[]} weights @param {number} window
 * @returns {[number, number, number, number, number][]}
 */
function sums(values, weights, window) {
  let [s0, s1, s2, t0, t1] = [0, 0, 0, 0, 0];
  return values.map((value, place) => {
    const by = weights[place];
    const keep = Math.exp(-by / window);
    [s0, s1, s2] = [keep * s0, keep * (s1 + by * s0), keep * (s2 + 2 * by * s1 + by * by * s0)];
    [t0, t1] = [keep * t0, keep * (t1 + by * t0)];
    if (value !== null) [s0, t0] = [s0 + by, t0 + by * value];
    return [s0, s1, s2, t0, t1];
  });
}
