/** The jobs that match the filters, as far as they were in sight. */

import { address, ask } from "./api.js";

/** @typedef {import("octet-types").Row} Job */

const PAGE = 100;
const GROUPS = /** @type {Record<string, string[]>} */ ({
  "": [],
  live: ["starting", "running", "pausing", "cancelling"],
  waiting: ["queued"],
});

export class Jobs {
  total = 0;
  /** @type {unknown} */
  error = null;
  /** @type {(Job | undefined)[]} */
  rows = [];
  onChange = () => {};
  onNews = () => {};
  onReload = () => {};
  #asked = new Set();
  #version = 0;

  /** @param {URLSearchParams} query @param {AbortSignal} signal */
  constructor(query, signal) {
    this.signal = signal;
    this.filters = {
      q: query.get("q") ?? "",
      state: query.get("state") ?? "",
      level: query.get("level") ?? "",
      pool: query.get("pool") ?? "",
      label: query.get("label") ?? "",
      sort: query.get("sort") ?? "",
    };
  }

  get isFiltered() {
    const { sort: _, ...others } = this.filters;
    return Object.values(others).some(Boolean);
  }

  /** Read the first page again, and forget the others. */
  async reload() {
    const version = ++this.#version;
    this.onReload();
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
    try {
      const page = await ask(this.#address(offset), { signal: this.signal });
      if (version !== this.#version) return;
      this.total = page.total;
      page.data.forEach((/** @type {Job} */ row, /** @type {number} */ place) => {
        this.rows[offset + place] = row;
      });
      this.error = null;
    } catch (error) {
      if (this.signal.aborted || version !== this.#version) return;
      this.#asked.delete(offset);
      this.error = error;
    }
    this.onChange();
  }

  /** The query of the first page: the list that a stream keeps up to date. */
  get list() {
    return this.#address(0).split("?")[1];
  }

  /** Take changes of the first page. @param {import("./live.js").Message[]} messages */
  receive(messages) {
    for (const { kind, list, total, ids, changed } of messages) {
      if (kind !== "rows" || list !== this.list) continue;
      const known = new Map([...this.rows.slice(0, PAGE), ...changed].map((row) => [row?.id, row]));
      const order = ids ?? this.rows.slice(0, PAGE).map((row) => row?.id);
      order.forEach((id, place) => {
        this.rows[place] = known.get(id);
      });
      this.total = total;
    }
    this.onNews();
  }

  /** Read the pages behind the first again when they are in sight next. */
  forget() {
    this.#asked = new Set([0]);
  }

  /** @param {number} offset */
  #address(offset) {
    const { state, ...others } = this.filters;
    return address("/v1/rows", { ...others, state: GROUPS[state] ?? [state], limit: PAGE, offset: offset || null });
  }
}
