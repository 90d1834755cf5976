/** Ask the REST API. The key lives in this tab's sessionStorage and travels in a header only. */

const KEY = "octet-key";

export const key = () => sessionStorage.getItem(KEY) ?? "";

/** @param {string} value */
export const setKey = (value) => sessionStorage.setItem(KEY, value);

/** An answer that is no success, in the words of its problem document. */
export class ApiError extends Error {
  /** @param {number} status @param {{title?: string, detail?: string, code?: string, errors?: any[]}} document */
  constructor(status, document) {
    super(document.detail ?? `The server answered ${status}.`);
    this.status = status;
    this.title = document.title ?? "The request failed";
    this.code = document.code ?? "";
    this.errors = document.errors ?? [];
  }
}

/** Return the headers of a request. @returns {Record<string, string>} */
export const headers = (secret = key()) => (secret ? { Authorization: `Bearer ${secret}` } : {});

/**
 * Ask, and read the answer's JSON. Raises ApiError; status 0 is a server that does not answer.
 * @param {string} path @param {RequestInit} [options] @returns {Promise<any>}
 */
export async function ask(path, options = {}) {
  let answer;
  let body = {};
  try {
    answer = await fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
    if (answer.status !== 204) body = await answer.json();
  } catch (error) {
    if (options.signal?.aborted) throw error;
    // A failure may have a proxy's words, which are no JSON. A success without JSON broke off.
    if (!answer || answer.ok)
      throw new ApiError(0, {
        title: "The server does not answer",
        detail: "Is `octet serve` running, and the network up? The page tries again by itself.",
      });
  }
  if (answer.ok) return body;
  if (answer.status === 401) dispatchEvent(new CustomEvent("octet-key-needed"));
  throw new ApiError(answer.status, body);
}

/**
 * Write a path with a query; empty values are left out, and lists repeat their name.
 * @param {string} path @param {Record<string, any>} query
 */
export function address(path, query) {
  const pairs = Object.entries(query).flatMap(([name, value]) => [value].flat().map((each) => [name, each]));
  const kept = pairs.filter(([, value]) => value !== "" && value != null && value !== false);
  const text = new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
  return text ? `${path}?${text}` : path;
}
