/** Build and change elements. Text is always text: nothing here parses markup. */

/** @typedef {Node | string | number | null | undefined | false} Child */

const SVG = "http://www.w3.org/2000/svg";

/**
 * Build an element. Names that begin with `on` are listeners, `data` is its dataset; null and false leave an attribute out.
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, any>} [attributes]
 * @param {...(Child | Child[])} children
 * @returns {HTMLElementTagNameMap[T]}
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  assign(element, attributes);
  element.append(...nodes(children));
  return element;
}

/**
 * Build an element of a drawing.
 * @template {keyof SVGElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, any>} [attributes]
 * @param {...Child} children
 * @returns {SVGElementTagNameMap[T]}
 */
export function svg(tag, attributes = {}, ...children) {
  const element = /** @type {SVGElementTagNameMap[T]} */ (document.createElementNS(SVG, tag));
  assign(element, attributes);
  element.append(...nodes(children));
  return element;
}

/** @param {Element} element @param {Record<string, any>} attributes */
function assign(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(/** @type {HTMLElement} */ (element).dataset, value);
    else if (name === "value") /** @type {HTMLInputElement} */ (element).value = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, String(value));
  }
}

/** @param {(Child | Child[])[]} children @returns {(Node | string)[]} */
function nodes(children) {
  const kept = children.flat().filter((child) => child !== null && child !== undefined && child !== false);
  return kept.map((child) => (child instanceof Node ? child : String(child)));
}

/** Replace an element's children. @param {Element} element @param {...(Child | Child[])} children */
export function fill(element, ...children) {
  element.replaceChildren(...nodes(children));
}

/**
 * Change a text where it differs, so that an unchanged row is not laid out again.
 * @param {Element} element @param {string} text
 */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Change an attribute where it differs. @param {Element} element @param {string} name @param {string | null} value */
export function mark(element, name, value) {
  if (element.getAttribute(name) === value) return;
  if (value === null) element.removeAttribute(name);
  else element.setAttribute(name, value);
}

/** Build an error's words: its violations, or its detail. @param {unknown} error @returns {HTMLElement} */
export function problem(error) {
  const { title, message, errors = [] } = /** @type {any} */ (error);
  const why = errors.length ? h("ul", {}, errors.map(violation)) : h("p", {}, message);
  return h("div", { class: "problem", role: "alert" }, h("strong", {}, title ?? "This part failed"), why);
}

/** Say what a field allows, and what to change. @param {{message: string, allowed: string | null}} each */
export const advice = ({ message, allowed }) => (allowed === null ? message : `Allowed: ${allowed}. ${message}`);

/** @param {any} each */
const violation = (each) => h("li", {}, h("code", {}, each.field || "the job"), `: got ${each.got}. ${advice(each)}`);

/**
 * Build a titled part of a page whose content may fail alone.
 * @param {string} title @param {...(Child | Child[])} children @returns {HTMLElement}
 */
export function panel(title, ...children) {
  return h("section", { class: "panel" }, h("h2", {}, title), ...children);
}
