/** A job's log, live: the newest lines, of all ranks or of one. */

import { fill, h, panel, problem } from "./dom.js";
import { clock } from "./figures.js";
import { remember } from "./main.js";
import { all } from "./requests.js";

/** @typedef {import("octet-types").LogLine} LogLine */

const MOST = 5000;
const SHOWN = 400;

export class Logs {
  /** @type {LogLine[]} */
  lines = [];
  #last = 0;
  #limit = SHOWN;
  #isNew = true;
  #ranks = 0;

  /** @param {import("./views/job.js").Shown} shown @param {URLSearchParams} query */
  constructor(shown, query) {
    this.shown = shown;
    this.rank = query.get("rank") ?? "";
    this.choice = h("select", {
      "aria-label": "Rank",
      hidden: true,
      onchange: () => {
        this.rank = this.choice.value;
        remember({ rank: this.rank });
        this.#isNew = true;
        this.draw();
      },
    });
    this.earlier = h(
      "button",
      {
        type: "button",
        class: "plain",
        hidden: true,
        onclick: () => {
          this.#limit += SHOWN;
          this.#isNew = true;
          this.draw();
        },
      },
      "Show earlier lines",
    );
    this.box = h("div", { class: "log", tabindex: 0, role: "log", "aria-label": "Log", "aria-live": "off" });
    this.note = h("div");
    this.element = panel("Log", h("div", { class: "controls" }, this.choice), this.note, this.earlier, this.box);
    this.#read();
  }

  async #read() {
    const { id, signal } = this.shown;
    try {
      this.take(await all(`/v1/jobs/${id}/logs`, signal, this.#last || ""));
    } catch (error) {
      if (!signal.aborted) fill(this.note, problem(error));
    }
    this.draw();
  }

  /** @param {LogLine[]} lines */
  take(lines) {
    for (const line of lines) {
      if (line.seq <= this.#last) continue;
      this.#last = line.seq;
      this.lines.push(line);
      this.#isNew = true;
    }
    if (this.lines.length > MOST) this.lines.splice(0, this.lines.length - MOST);
  }

  /** @param {import("./live.js").Message[]} messages */
  receive(messages) {
    this.take(messages.flatMap(({ kind, data }) => (kind === "log_line" ? data : [])));
  }

  /** Return where the stream of lines goes on. */
  get cursor() {
    return `log_line.${this.shown.id}.${this.#last}`;
  }

  draw() {
    if (!this.#isNew) return;
    this.#isNew = false;
    const ranks = [...new Set(this.lines.map(({ rank }) => rank))].sort((one, other) => one - other);
    if (ranks.length !== this.#ranks) {
      this.#ranks = ranks.length;
      this.choice.hidden = ranks.length < 2 && !this.rank;
      fill(
        this.choice,
        h("option", { value: "" }, "all ranks"),
        ranks.map((rank) => h("option", { value: rank, selected: String(rank) === this.rank }, `rank ${rank}`)),
      );
    }
    const wanted = this.rank === "" ? this.lines : this.lines.filter(({ rank }) => String(rank) === this.rank);
    const shown = wanted.slice(-this.#limit);
    this.earlier.hidden = shown.length === wanted.length;
    const { box } = this;
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    if (!wanted.length) return fill(box, h("p", { class: "muted" }, "No line yet."));
    // Lines are kept while they stay: only new ones are added, and old ones go at the top.
    const first = shown[0].seq;
    while (box.firstElementChild && Number(/** @type {HTMLElement} */ (box.firstElementChild).dataset.seq ?? -1) !== first)
      box.firstElementChild.remove();
    const last = Number(/** @type {HTMLElement | null} */ (box.lastElementChild)?.dataset.seq ?? -1);
    box.append(...shown.filter(({ seq }) => seq > last).map((line) => lineOf(line, ranks.length > 1)));
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  }
}

/** @param {LogLine} line @param {boolean} namesRank */
function lineOf({ seq, at, rank, level, message }, namesRank) {
  return h(
    "div",
    { class: `line ${level.toLowerCase()}`, data: { seq } },
    h("time", { datetime: at }, clock(at)),
    namesRank && h("span", { class: "rank" }, `rank ${rank}`),
    level === "INFO" ? null : h("b", {}, level.toLowerCase()),
    h("span", {}, message),
  );
}
