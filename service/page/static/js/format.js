/** Write values as `octet` writes them on a terminal (client/text.py). A missing value is a dash. */

export const MISSING = "–";

/** @param {number | null | undefined} value @param {number} [digits] */
export const number = (value, digits = 4) => (value == null ? MISSING : value.toFixed(digits));

/** @param {number | null | undefined} value */
export const count = (value) => (value == null ? MISSING : Math.round(value).toLocaleString("en-US"));

/** Write a time as 4.5 s, 2:03 or 1:02:03. @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return MISSING;
  if (seconds < 60) return `${Math.max(0, seconds).toFixed(1)} s`;
  const whole = Math.round(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  const two = (/** @type {number} */ part) => String(part).padStart(2, "0");
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

/** Write how long ago something was. @param {string | null | undefined} moment @param {number} [now] */
export function age(moment, now = Date.now()) {
  if (!moment) return MISSING;
  const seconds = Math.max(0, (now - Date.parse(moment)) / 1000);
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} d`;
}
