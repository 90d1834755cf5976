/** Arms to compare: with levels or varied fields chosen, the form starts a comparison of the job in place of the job. */

import { h } from "../dom.js";
import { Form } from "../form.js";
import { badge } from "../levels.js";
import { remember } from "../main.js";
import { withValue } from "../schema.js";

const FIELDS = ["vary", "baseline", "seeds", "at_once", "tolerance"];

/** Read an option of the address: an object and numbers as JSON, a name as it is. @param {string} text */
function given(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** Quote a word of a command for the shell, if it needs it. @param {unknown} word */
const quoted = (word) => (/^[\w.,=+-]+$/.test(String(word)) ? String(word) : `'${String(word).replaceAll("'", `'\\''`)}'`);

export class ComparisonChoice {
  /**
   * @param {import("../schema.js").JobSchema} schema @param {import("./submit.js").Catalog} catalog
   * @param {URLSearchParams} query @param {() => void} onChange
   */
  constructor(schema, catalog, query, onChange) {
    const asked = (query.get("levels") ?? "").split(",");
    /** @type {Record<string, any>} */
    this.options = Object.fromEntries(
      FIELDS.filter((name) => query.has(name)).map((name) => [name, given(query.get(name) ?? "")]),
    );
    this.boxes = catalog.levels.map(({ name }) => {
      const box = h("input", { type: "checkbox", value: name, checked: asked.includes(name), onchange: () => this.#tell() });
      return { box, label: h("label", { class: "chip" }, box, badge(name)) };
    });
    this.onChange = onChange;
    this.form = new Form(schema, (path, value) => {
      this.options = withValue(this.options, path, value);
      this.#tell();
    });
    const { properties } = schema.plain(schema.all.ComparisonSpec);
    const fields = FIELDS.map((name) => this.form.field(name, properties[name]));
    const first = h(
      "p",
      { class: "muted" },
      "In place of the level above, and each with each value of vary: {training.optimizer.learning_rate: [1e-4, 3e-4]}. " +
        "The first is the baseline, unless one is named as an arm of the report. All train with the same seeds and data.",
    );
    this.element = h(
      "details",
      { open: this.isChosen },
      h("summary", {}, "Compare levels, or other settings"),
      h(
        "fieldset",
        { class: "compared" },
        h("legend", { class: "hidden" }, "Levels to compare"),
        h(
          "div",
          { class: "chips" },
          this.boxes.map(({ label }) => label),
        ),
        first,
        h("div", { class: "fields" }, fields),
      ),
    );
    this.form.show(this.options);
  }

  /** The chosen levels, in the order of the catalog. */
  get levels() {
    return this.boxes.filter(({ box }) => box.checked).map(({ box }) => box.value);
  }

  /** True if a field has values to compare, as far as they can be read. */
  get varies() {
    const { vary } = this.options;
    return vary != null && typeof vary === "object" && Object.keys(vary).length > 0;
  }

  /** True if there is something to compare. */
  get isChosen() {
    return this.levels.length > 0 || this.varies;
  }

  /** Return the comparison of a job; null where nothing is chosen. @param {any} job */
  of(job) {
    return this.isChosen ? { job, levels: this.levels, ...this.options } : null;
  }

  /** Write the same as a command, for a job in a file. */
  get command() {
    const { vary, ...others } = this.options;
    const words = this.levels.length ? [["levels", this.levels.join(",")]] : [];
    if (this.varies)
      words.push(...Object.entries(vary).map(([path, values]) => ["vary", `${path}=${[values].flat().join(",")}`]));
    words.push(...Object.entries(others).map(([name, value]) => [name.replace("_", "-"), value]));
    return `octet compare job.yaml${words.map(([name, value]) => ` --${name} ${quoted(value)}`).join("")}`;
  }

  #tell() {
    const vary = this.varies ? JSON.stringify(this.options.vary) : null;
    const none = Object.fromEntries(FIELDS.map((name) => [name, null]));
    remember({ levels: this.levels.join(","), ...none, ...this.options, vary });
    this.onChange();
  }
}
