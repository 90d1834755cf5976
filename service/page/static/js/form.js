/** Fields made from a JSON schema. A field knows its path in the document, shows its default, and its error beside it. */

import { advice, fill, h, mark } from "./dom.js";
import { flow, fromYaml } from "./yaml.js";
import { valueAt } from "./schema.js";

/** @typedef {import("./schema.js").Schema} Schema */
/** @typedef {(path: string, value: any) => void} OnChange */

export class Form {
  /** @type {Map<string, {input: HTMLInputElement | HTMLSelectElement, note: HTMLElement, schema: Schema}>} */
  #fields = new Map();

  /** @param {import("./schema.js").JobSchema} schema @param {OnChange} onChange */
  constructor(schema, onChange) {
    this.schema = schema;
    this.onChange = onChange;
  }

  /**
   * Build the field of a path.
   * @param {string} path @param {Schema} raw @param {{label?: string, options?: string[]}} [words]
   * @returns {HTMLElement}
   */
  field(path, raw, { label, options } = {}) {
    const schema = this.schema.plain(raw);
    const id = `field-${path.replaceAll(".", "-")}`;
    const choices = options ?? schema.enum;
    const input = choices ? this.#choice(id, choices, schema) : this.#input(id, schema);
    input.addEventListener(choices || schema.type === "boolean" ? "change" : "input", () =>
      this.onChange(path, this.#read(input, schema)),
    );
    const note = h("small", { class: "bad", id: `${id}-note` });
    const help = schema.description ? h("small", { id: `${id}-help` }, schema.description) : null;
    mark(input, "aria-describedby", [help && `${id}-help`, `${id}-note`].filter(Boolean).join(" "));
    this.#fields.set(path, { input, note, schema });
    const name = h("label", { for: id }, label ?? path.split(".").at(-1)?.replaceAll("_", " "));
    return h("div", { class: schema.type === "boolean" ? "field switch" : "field" }, name, input, help, note);
  }

  /**
   * Build the fields of an object but for some, those of its parts included.
   * @param {string} path @param {Schema} raw @param {any} value @param {Set<string>} except @returns {HTMLElement[]}
   */
  fields(path, raw, value, except) {
    const shape = this.schema.shape(raw, value);
    return Object.entries(shape.properties ?? {}).flatMap(([name, each]) => {
      const at = path ? `${path}.${name}` : name;
      if (except.has(at)) return [];
      const part = this.schema.plain(each);
      if (part.properties && !part.isNullable) return this.fields(at, each, value?.[name], except);
      return [this.field(at, each, { label: at.split(".").slice(1).join(" ").replaceAll("_", " ") })];
    });
  }

  /** @param {string} id @param {string[]} choices @param {Schema} schema */
  #choice(id, choices, schema) {
    const fallback = schema.default ?? null;
    const none = fallback === null || !choices.includes(fallback) ? h("option", { value: "" }, "–") : null;
    return h(
      "select",
      { id },
      none,
      choices.map((each) => h("option", { value: each }, each === fallback ? `${each} (default)` : each)),
    );
  }

  /** @param {string} id @param {Schema} schema */
  #input(id, schema) {
    if (schema.type === "boolean") return h("input", { id, type: "checkbox" });
    const isNumber = schema.type === "integer" || schema.type === "number";
    const shown = schema.default ?? null;
    return h("input", {
      id,
      type: "text",
      inputmode: isNumber ? "decimal" : null,
      autocomplete: "off",
      spellcheck: "false",
      placeholder: shown === null ? "" : text(shown),
    });
  }

  /**
   * Read what a person put in: empty is the default.
   * @param {HTMLInputElement | HTMLSelectElement} input @param {Schema} schema
   */
  #read(input, schema) {
    if (input instanceof HTMLInputElement && input.type === "checkbox")
      return input.checked === (schema.default ?? false) ? undefined : input.checked;
    if (input.value.trim() === "") return undefined;
    if (schema.type === "string" || schema.enum) return input.value;
    try {
      return fromYaml(`value: ${input.value}`).value;
    } catch {
      return input.value;
    }
  }

  /** Show a document's values, but not in the field that is being written in. @param {any} document */
  show(document) {
    for (const [path, { input, schema }] of this.#fields) {
      if (input === globalThis.document.activeElement) continue;
      const value = valueAt(document, path);
      if (input instanceof HTMLInputElement && input.type === "checkbox") input.checked = value ?? schema.default ?? false;
      else
        input.value =
          value === undefined || value === null
            ? input instanceof HTMLSelectElement
              ? (schema.default ?? "")
              : ""
            : text(value);
    }
  }

  /**
   * Show errors at their fields, and open what hides these.
   * @param {{field: string, message: string, allowed: string}[]} errors
   */
  complain(errors) {
    for (const { input, note } of this.#fields.values()) {
      fill(note);
      mark(input, "aria-invalid", null);
    }
    for (const error of errors) {
      const found = this.#fields.get(error.field);
      if (!found) continue;
      fill(found.note, advice(error));
      mark(found.input, "aria-invalid", "true");
      for (let around = found.input.closest("details"); around; around = around.parentElement?.closest("details") ?? null)
        around.open = true;
    }
  }

  /** Forget the fields below a path, which are about to be built again. @param {string} path */
  forget(path) {
    for (const each of this.#fields.keys()) if (each.startsWith(`${path}.`)) this.#fields.delete(each);
  }
}

/** @param {any} value */
const text = (value) => (typeof value === "string" ? value : typeof value === "object" ? flow(value) : String(value));
