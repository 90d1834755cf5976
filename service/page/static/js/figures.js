/** Write the values that a list does not have: sizes, ratios, moments. A missing value is a dash. */

import { MISSING } from "./format.js";

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

/** Write a ratio as a percentage. @param {number | null | undefined} value @param {number} [digits] */
export const percent = (value, digits = 0) => (value == null ? MISSING : `${(100 * value).toFixed(digits)} %`);

/** Write a number with three digits, and a power where it needs one. @param {number | null | undefined} value */
export function short(value) {
  if (value == null || !Number.isFinite(value)) return MISSING;
  const size = Math.abs(value);
  if (size >= 1e4) return compact(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(2).replace("e-", "e−");
  return String(+value.toPrecision(3));
}

/** Write a large count as 1.2k, 3.4M. @param {number} value */
export function compact(value) {
  let [size, place] = [value, 0];
  while (Math.abs(size) >= 999.5 && place < 4) [size, place] = [size / 1000, place + 1];
  return `${+size.toPrecision(3)}${["", "k", "M", "G", "T"][place]}`;
}

/** Write a size with three digits and a decimal prefix. @param {number | null | undefined} value */
export function bytes(value) {
  if (value == null) return MISSING;
  let [size, place] = [value, 0];
  while (size >= 999.5 && place < UNITS.length - 1) [size, place] = [size / 1000, place + 1];
  return `${+size.toPrecision(3)} ${UNITS[place]}`;
}

/** Write a moment in the reader's zone. @param {string | null | undefined} moment */
export function clock(moment) {
  if (!moment) return MISSING;
  const [at, now] = [new Date(moment), new Date()];
  const time = at.toLocaleTimeString([], { hour12: false });
  const year = at.getFullYear() === now.getFullYear() ? undefined : "numeric";
  const day = at.toLocaleDateString([], { month: "short", day: "numeric", year });
  return at.toDateString() === now.toDateString() ? time : `${day} ${time}`;
}

/** Return the seconds between two moments. @param {string | null | undefined} begin @param {string | null | undefined} end */
export const between = (begin, end) => (begin && end ? (Date.parse(end) - Date.parse(begin)) / 1000 : null);
