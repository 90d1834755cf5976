/** A long list of which the rows in sight alone are in the document. The window scrolls; every row has the same height. */

import { h } from "./dom.js";

const SPARE = 6;

/**
 * @template T
 * @typedef {{element: HTMLElement, update: (item: T | undefined, index: number) => void}} Row
 */

/** @template T */
export class Rows {
  #first = 0;
  /** @type {Row<T>[]} */
  #rows = [];
  #count = 0;
  element = h("div", { class: "rows", role: "rowgroup" });

  /**
   * @param {{make: () => Row<T>, item: (index: number) => T | undefined, signal: AbortSignal}} parts
   * `make` builds an empty row, `item` gives what stands in one; undefined is not there yet
   */
  constructor({ make, item, signal }) {
    this.make = make;
    this.item = item;
    addEventListener("scroll", () => this.draw(), { signal, passive: true });
    addEventListener("resize", () => this.draw(), { signal });
  }

  /** Set how many items there are. @param {number} count */
  resize(count) {
    this.#count = count;
    this.draw();
  }

  /** Write the rows in sight. Their elements are used again while the list scrolls. */
  draw() {
    const height = this.height;
    const top = Math.max(0, -this.element.getBoundingClientRect().top);
    const num = Math.min(this.#count, Math.ceil(innerHeight / height) + 2 * SPARE);
    this.#first = Math.max(0, Math.min(Math.floor(top / height) - SPARE, this.#count - num));
    while (this.#rows.length < num) {
      const row = this.make();
      this.#rows.push(row);
      this.element.append(row.element);
    }
    while (this.#rows.length > num) this.#rows.pop()?.element.remove();
    this.element.style.height = `${this.#count * height}px`;
    this.#rows.forEach((row, place) => {
      const index = this.#first + place;
      row.element.style.transform = `translateY(${index * height}px)`;
      row.element.setAttribute("aria-rowindex", String(index + 2));
      row.update(this.item(index), index);
    });
  }

  get height() {
    return parseFloat(getComputedStyle(this.element).getPropertyValue("--row")) || 48;
  }

  /** Bring a row into sight. @param {number} index */
  reveal(index) {
    const top = this.element.getBoundingClientRect().top + index * this.height;
    if (top < 120) scrollBy(0, top - 120);
    else if (top + this.height > innerHeight - 80) scrollBy(0, top + this.height - innerHeight + 80);
    this.draw();
  }
}
