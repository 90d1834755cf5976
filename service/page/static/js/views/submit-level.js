/**
 * The choice of a level: what each stores, the bytes that the chosen model takes at it, and whether a device of the pool
 * has them.
 */

import { fill, h } from "../dom.js";
import { bytes } from "../figures.js";
import { badge } from "../levels.js";

/**
 * Draw a size beside the largest.
 * @param {number} size @param {number} most @param {number | null} room what a device has
 */
function sizeBar(size, most, room) {
  const bar = h("i");
  bar.style.width = `${(100 * size) / most}%`;
  const isTooLarge = room !== null && size > room;
  const fits = isTooLarge ? `${bytes(size)}, a device has ${bytes(room)}` : bytes(size);
  return [h("span", { class: "bar" }, bar), h("small", { class: isTooLarge ? "bad" : null }, fits)];
}

export class LevelChoice {
  #shown = "";

  /** @param {import("./submit.js").Catalog} catalog @param {(level: string) => void} onChange */
  constructor(catalog, onChange) {
    this.catalog = catalog;
    this.element = h("fieldset", { class: "levels" }, h("legend", { class: "hidden" }, "Level"));
    this.element.addEventListener("change", (event) => onChange(/** @type {HTMLInputElement} */ (event.target).value));
  }

  /** Show the level of a document. @param {any} document */
  show(document) {
    const { preset } = typeof document?.model === "string" ? { preset: document.model } : (document?.model ?? {});
    const level = typeof document?.precision === "string" ? document.precision : (document?.precision?.level ?? "O2");
    const pool = this.catalog.pools.find(({ name }) => name === (document?.resources?.pool ?? "cpu"));
    const model = this.catalog.families.flatMap(({ presets }) => presets).find(({ name }) => name === preset);
    const words = `${preset} ${pool?.name}`;
    if (words !== this.#shown) {
      this.#shown = words;
      const most = model ? Math.max(...Object.values(/** @type {Record<string, number>} */ (model.bytes_by_level))) : 0;
      const rows = [...this.catalog.levels, this.#automatic()].map((each) =>
        this.#row(each, model?.bytes_by_level[each.name] ?? null, most, pool?.memory_per_device_bytes ?? null),
      );
      fill(this.element, h("legend", { class: "hidden" }, "Level"), rows);
    }
    for (const input of this.element.querySelectorAll("input")) input.checked = input.value === level;
  }

  /** Describe the level that the service chooses by the job's plan. */
  #automatic() {
    const names = this.catalog.levels.filter((each) => each.is_automatic).map(({ name }) => name);
    return { name: "auto", description: `the first that surely fits the pool's devices, of ${names.join(", ")}` };
  }

  /**
   * @param {Pick<import("octet-types").Level, "name" | "description">} level @param {number | null} size @param {number} most
   * @param {number | null} room
   */
  #row(level, size, most, room) {
    return h(
      "label",
      { class: "choice-row" },
      h("input", { type: "radio", name: "level", value: level.name }),
      badge(level.name),
      h("span", { class: "what" }, level.description),
      h("span", { class: "size" }, size === null ? null : sizeBar(size, most, room)),
    );
  }
}
