/** Reduce a curve to what a screen can show: in each column of pixels its first, least, greatest and last value. */

/**
 * Find the points of a line through x and y in a range of x. No value between that would be seen is left out.
 * @param {ArrayLike<number>} x rising @param {ArrayLike<number | null>} y
 * @param {number} from @param {number} to @param {number} columns
 * @returns {[number, number | null][]} a null breaks the line
 */
export function decimate(x, y, from, to, columns) {
  const begin = Math.max(0, firstAt(x, from) - 1);
  const end = Math.min(x.length, firstAt(x, to) + 1);
  /** @type {[number, number | null][]} */
  const line = [];
  if (end - begin <= 4 * columns) {
    for (let place = begin; place < end; place++) line.push([x[place], y[place]]);
    return line;
  }
  const width = (to - from) / columns || 1;
  for (let place = begin; place < end;) {
    const column = Math.floor((x[place] - from) / width);
    let [least, most, last] = [place, place, place];
    let hasGap = false;
    const first = place;
    for (; place < end && Math.floor((x[place] - from) / width) === column; place++) {
      const value = y[place];
      if (value === null) hasGap = true;
      else {
        if (y[least] === null || value < /** @type {number} */ (y[least])) least = place;
        if (y[most] === null || value > /** @type {number} */ (y[most])) most = place;
      }
      last = place;
    }
    for (const each of new Set([first, Math.min(least, most), Math.max(least, most), last]))
      if (y[each] !== null) line.push([x[each], y[each]]);
    if (hasGap) line.push([x[last], null]);
  }
  return line;
}

/** Find the first place where x is at least a value. @param {ArrayLike<number>} x @param {number} value */
export function firstAt(x, value) {
  let [low, high] = [0, x.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}
