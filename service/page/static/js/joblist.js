/** The jobs that match the filters, as far as they were in sight. */

import { address, ask } from "./api.js";

/** @typedef {import("octet-types").Row} Job */

const PAGE = 100;
const GROUPS = /** @type {Record<string, string[]>} */ ({ "": [], live: ["starting", "running", "cancelling"], waiting: ["queued"] });

export class Jobs {
  total = 0;
  /** @type {unknown} */
  error = null;
  /** @type {(Job | undefined)[]} */
  rows = [];
  onChange = () => {};
  onNews = () => {};
  #asked = new Set();
  #version = 0;
  #again = 0;

  /** @param {URLSearchParams} query @param {AbortSignal} signal */
  constructor(query, signal) {
    this.signal = signal;
    this.filters = { q: query.get("q") ?? "", state: query.get("state") ?? "", level: query.get("level") ?? "", pool: query.get("pool") ?? "", label: query.get("label") ?? "", sort: query.get("sort") ?? "" };
  }

  get isFiltered() {
    const { sort: _, ...others } = this.filters;
    return Object.values(others).some(Boolean);
  }

  /** Read the first page again, and forget the others. */
  async reload() {
    const version = ++this.#version;
    this.#asked.clear();
    await this.#read(0, version);
    if (version === this.#version) this.rows.length = Math.min(this.rows.length, PAGE);
  }

  /** @param {number} index @returns {Job | undefined} */
  at(index) {
    const begin = index - (index % PAGE);
    if (!this.#asked.has(begin)) this.#read(begin, this.#version);
    return this.rows[index];
  }

  /** @param {number} offset @param {number} version */
  async #read(offset, version) {
    this.#asked.add(offset);
    const { state, ...others } = this.filters;
    try {
      const page = await ask(address("/v1/rows", { ...others, state: GROUPS[state] ?? [state], limit: PAGE, offset }), { signal: this.signal });
      if (version !== this.#version) return;
      this.total = page.total;
      page.data.forEach((/** @type {Job} */ row, /** @type {number} */ place) => { this.rows[offset + place] = row; });
      this.error = null;
    } catch (error) {
      if (this.signal.aborted || version !== this.#version) return;
      this.#asked.delete(offset);
      this.error = error;
    }
    this.onChange();
  }

  /** Take changed rows. One that is new, or that the filters may not show any longer, makes the list be read again. @param {import("../live.js").Message[]} messages */
  receive(messages) {
    const places = new Map(this.rows.map((row, place) => [row?.id, place]));
    for (const { kind, job, data } of messages) {
      if (kind === "again") this.#later();
      if (kind !== "row") continue;
      const place = places.get(job);
      if (place === undefined || this.rows[place]?.state !== data.state) this.#later();
      if (place !== undefined) this.rows[place] = data;
    }
    this.onNews();
  }

  #later() {
    if (!this.#again) this.#again = setTimeout(() => { this.#again = 0; if (!this.signal.aborted) this.reload(); }, 300);
  }
}
