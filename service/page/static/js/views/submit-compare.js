/** Levels to compare: with some chosen, the form starts a comparison of the job at each of them, in place of the job. */

import { h } from "../dom.js";
import { Form } from "../form.js";
import { badge } from "../levels.js";
import { remember } from "../main.js";
import { withValue } from "../schema.js";

const FIELDS = ["seeds", "tolerance"];

export class ComparisonChoice {
  /**
   * @param {import("../schema.js").JobSchema} schema @param {import("./submit.js").Catalog} catalog
   * @param {URLSearchParams} query @param {() => void} onChange
   */
  constructor(schema, catalog, query, onChange) {
    const asked = (query.get("levels") ?? "").split(",");
    const given = FIELDS.flatMap((name) => (query.has(name) ? [[name, Number(query.get(name))]] : []));
    /** @type {Record<string, any>} */
    this.options = Object.fromEntries(given);
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
      "In place of the level above. The first is the baseline; all train with the same seeds and data.",
    );
    this.element = h(
      "details",
      { open: this.levels.length > 0 },
      h("summary", {}, "Compare levels"),
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

  /** Return the comparison of a job; null where no level is chosen. @param {any} job */
  of(job) {
    return this.levels.length ? { job, levels: this.levels, ...this.options } : null;
  }

  /** Write the same as a command, for a job in a file. */
  get command() {
    const options = Object.entries(this.options).map(([name, value]) => ` --${name} ${value}`);
    return `octet compare job.yaml --levels ${this.levels.join(",")}${options.join("")}`;
  }

  #tell() {
    remember({ levels: this.levels.join(","), seeds: null, tolerance: null, ...this.options });
    this.onChange();
  }
}
