/** The SharedWorker of all tabs: a browser opens six connections to a host, so a stream in each tab would block the seventh. */

import { Hub } from "./stream.js";

const hub = new Hub();
const QUIET_MS = 180_000;

addEventListener("connect", (event) => {
  const [port] = /** @type {MessageEvent} */ (event).ports;
  /** @type {import("./stream.js").Client | null} */
  let client = null;
  let isIn = false;
  let quiet = 0;
  const leave = () => {
    if (client && isIn) hub.leave(client);
    isIn = false;
  };
  port.onmessage = ({ data }) => {
    clearTimeout(quiet);
    if (!data.alive) leave();
    if (!data.alive) client = data.bye ? null : { ...data, post: (messages) => port.postMessage(messages) };
    if (!client) return;
    // A tab that crashed says no goodbye. One that slept joins again with its next beat.
    quiet = setTimeout(leave, QUIET_MS);
    if (!isIn) hub.join(client);
    isIn = true;
  };
});
