/** Requests that a list does not need: send a document, read all pages. */

import { address, ask } from "./api.js";

/**
 * Send a document. `once` makes a repeated send the same action.
 * @param {string} path @param {unknown} body @param {{once?: string, signal?: AbortSignal}} [options] @returns {Promise<any>}
 */
export function send(path, body, { once, signal } = {}) {
  /** @type {Record<string, string>} */
  const extra = once ? { "Idempotency-Key": once } : {};
  return ask(path, {
    method: "POST",
    body: JSON.stringify(body),
    signal,
    headers: { "Content-Type": "application/json", ...extra },
  });
}

/**
 * Read all pages of a list.
 * @param {string} path @param {AbortSignal} signal @param {string | number} [begin] the last id of what is known
 * @returns {Promise<any[]>}
 */
export async function all(path, signal, begin = "") {
  const items = [];
  for (let after = begin; ;) {
    const page = await ask(address(path, { limit: 1000, after }), { signal });
    items.push(...page.data);
    if (!page.has_more) return items;
    after = page.last_id;
  }
}
