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
 * Yield the documents of an answer that has one in each line, as they come. Raises as `ask` does.
 * @param {string} path @param {RequestInit} options @returns {AsyncGenerator<any>}
 */
export async function* askLines(path, options) {
  const asked = { ...options, headers: { ...headers(), ...options.headers, Accept: "application/x-ndjson" } };
  const answer = await fetch(path, asked).catch((error) => {
    if (options.signal?.aborted) throw error;
    throw silence();
  });
  if (!answer.ok || !answer.body) throw refusal(answer.status, await answer.json().catch(() => ({})));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) yield JSON.parse(line);
  }
}

/** An answer that did not come. */
const silence = () =>
  new ApiError(0, {
    title: "The server does not answer",
    detail: "Is `octet serve` running, and the network up? The page tries again by itself.",
  });

/** An answer that is no success. @param {number} status @param {any} document */
function refusal(status, document) {
  if (status === 401) dispatchEvent(new CustomEvent("octet-key-needed"));
  return new ApiError(status, document);
}

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
    if (!answer || answer.ok) throw silence();
  }
  if (answer.ok) return body;
  throw refusal(answer.status, body);
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
