/** The plan beside the form: what the job would take, asked for once it is valid and nobody types. */

import { fill, h, panel, problem } from "../dom.js";
import { send } from "../requests.js";
import { planTable } from "./plan.js";

const PAUSE_MS = 900;

export class PlanBeside {
  #waiting = 0;
  #asked = "";
  #asking = new AbortController();

  /** @param {AbortSignal} signal */
  constructor(signal) {
    this.signal = signal;
    this.place = h("div", { "aria-live": "polite" }, h("p", { class: "muted" }, "Once the job is valid."));
    this.element = panel("Plan", this.place);
    signal.addEventListener("abort", () => this.#stop());
  }

  #stop() {
    clearTimeout(this.#waiting);
    this.#asking.abort();
  }

  /**
   * Plan a valid job, unless this was asked last.
   * @param {any} job @param {string[]} levels none: its own, and the states of all
   */
  show(job, levels) {
    const { name: _name, labels: _labels, priority: _priority, data: _data, ...others } = job;
    const words = JSON.stringify([others, levels]);
    if (words === this.#asked) return;
    this.#stop();
    this.#asked = words;
    this.#asking = new AbortController();
    const { signal } = this.#asking;
    this.#waiting = setTimeout(() => this.#ask({ job, levels }, signal), PAUSE_MS);
  }

  /** @param {{job: any, levels: string[]}} request @param {AbortSignal} signal */
  async #ask(request, signal) {
    fill(this.place, h("p", { class: "muted" }, "Planning… The first plan of a server takes some seconds."));
    try {
      const plan = await send("/v1/plans", request, { signal });
      if (!signal.aborted) fill(this.place, planTable(plan));
    } catch (error) {
      if (signal.aborted) return;
      this.#asked = "";
      fill(this.place, problem(error));
    }
  }
}
