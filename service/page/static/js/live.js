/** What changes while a tab looks at it. One stream serves all tabs of a browser, in a SharedWorker where there is one. */

import { key } from "./api.js";
import { age } from "./format.js";

/** `points`, `event` and `log_line` have a list as `data`, `row` one row, `gone` nothing, and `rows` a list of jobs. */
/**
 * @typedef {{kind: string, job: string, data: any, list: string, total: number, ids: string[] | null,
 *   changed: import("octet-types").Row[]}} Message
 */
/** @typedef {Partial<Pick<import("./stream.js").Client, "list" | "jobs" | "cursors">>} Wish */

const BEAT_MS = 20_000;

/** @type {(status: {state: "idle" | "connecting" | "live" | "lost", since: string}) => void} */
let tell = () => {};
/** @type {{state: any, at: number}} */
let status = { state: "idle", at: Date.now() };
/** @type {Promise<{post: (message: any) => void}> | null} */
let line = null;
/** @type {((messages: Message[]) => void) | null} */
let hand = null;

/** @param {typeof tell} listener */
export function onStatus(listener) {
  tell = listener;
  setInterval(repeat, 1000);
  repeat();
}

const repeat = () => tell({ state: status.state, since: `${age(new Date(status.at).toISOString())} ago` });

/**
 * Follow the changes that a view wishes for, until it is left.
 * @param {Wish} wish @param {(messages: Message[]) => void} onMessages @param {AbortSignal} signal
 */
export async function watch(wish, onMessages, signal) {
  line ??= open();
  const { post } = await line;
  if (signal.aborted) return;
  hand = onMessages;
  post({ key: key(), list: null, jobs: [], cursors: [], ...wish });
  signal.addEventListener("abort", () => {
    if (hand !== onMessages) return;
    hand = null;
    post({ bye: true });
    status = { state: "idle", at: Date.now() };
    repeat();
  });
}

/** @param {any[]} messages */
function receive(messages) {
  for (const message of messages) if (message.kind === "status") [status] = [message];
  repeat();
  hand?.(messages);
}

/** @returns {Promise<{post: (message: any) => void}>} */
async function open() {
  const opened = "SharedWorker" in globalThis ? shared() : await direct();
  setInterval(() => {
    if (hand) opened.post({ alive: true });
  }, BEAT_MS);
  addEventListener("pagehide", () => opened.post({ bye: true }));
  return opened;
}

function shared() {
  const { port } = new SharedWorker(new URL("./stream-worker.js", import.meta.url), { type: "module", name: "octet" });
  port.onmessage = ({ data }) => receive(data);
  return { post: (/** @type {any} */ message) => port.postMessage(message) };
}

async function direct() {
  const { Hub } = await import("./stream.js");
  const hub = new Hub();
  /** @type {import("./stream.js").Client | null} */
  let client = null;
  const post = (/** @type {any} */ message) => {
    if (message.alive) return;
    if (client) hub.leave(client);
    client = message.bye ? null : { ...message, post: receive };
    if (client) hub.join(client);
  };
  return { post };
}
