/** Read the JSON schema of a job: which field stands where, what its default is, which of several shapes a part has. */

import { ask } from "./api.js";

/** @typedef {Record<string, any>} Schema */

/** @type {Promise<Record<string, Schema>> | null} */
let known = null;

/** Read the schemas of the API, once. @returns {Promise<Record<string, Schema>>} */
export function schemas() {
  known ??= ask("/openapi.json").then((document) => document.components.schemas);
  known.catch(() => {
    known = null;
  });
  return known;
}

export class JobSchema {
  /** @param {Record<string, Schema>} all */
  constructor(all) {
    this.all = all;
    this.root = all.JobSpec;
  }

  /** Follow references, and leave out that a value may be null. @param {Schema} schema @returns {Schema} */
  plain(schema) {
    if (schema.$ref) return this.plain({ ...this.all[schema.$ref.split("/").at(-1)], ...without(schema, "$ref") });
    const others = schema.anyOf?.filter((/** @type {Schema} */ each) => each.type !== "null");
    return others?.length === 1 ? this.plain({ ...others[0], ...without(schema, "anyOf"), isNullable: true }) : schema;
  }

  /**
   * Choose the shape of a part that may have several: the one that its own field names.
   * @param {Schema} schema @param {any} value @returns {Schema}
   */
  shape(schema, value) {
    const flat = this.plain(schema);
    const members = /** @type {Schema[]} */ (flat.oneOf ?? flat.anyOf ?? [])
      .map((each) => this.plain(each))
      .filter((each) => each.properties);
    if (!members.length) return flat;
    const named = members.find(({ properties }) =>
      Object.entries(properties).some(([name, { const: fixed }]) => fixed !== undefined && value?.[name] === fixed),
    );
    return { ...(named ?? members[0]), description: flat.description };
  }

  /** Leave out of a document what is a default. @param {any} value @param {Schema} [schema] @returns {any} */
  prune(value, schema = this.root) {
    const shape = this.shape(schema, value);
    if (value === null || typeof value !== "object" || Array.isArray(value) || !shape.properties) return value;
    const kept = Object.entries(value).map(([name, each]) => {
      const field = shape.properties[name];
      if (!field) return [name, each];
      const part = this.prune(each, field);
      const isDefault =
        same(each, field.default) || (each === null && this.plain(field).isNullable) || (isEmpty(part) && !isEmpty(each));
      return isDefault || (isEmpty(each) && field.default === undefined && !(shape.required ?? []).includes(name))
        ? null
        : [name, part];
    });
    return Object.fromEntries(/** @type {[string, any][]} */ (kept.filter((pair) => pair !== null)));
  }
}

/** @param {Schema} schema @param {string} name */
function without(schema, name) {
  const { [name]: _, ...others } = schema;
  return others;
}

/** @param {any} one @param {any} other */
const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

/** @param {any} value */
const isEmpty = (value) => value !== null && typeof value === "object" && !Object.keys(value).length;

/** Read a value of a document. @param {any} document @param {string} path @returns {any} */
export const valueAt = (document, path) => path.split(".").reduce((value, name) => value?.[name], document);

/**
 * Write a value into a copy of a document; undefined takes it out, and parts that are empty then.
 * @param {any} document @param {string} path @param {any} value @returns {any}
 */
export function withValue(document, path, value) {
  const [name, ...rest] = path.split(".");
  const copy = document && typeof document === "object" ? { ...document } : {};
  const part = rest.length ? withValue(copy[name], rest.join("."), value) : value;
  if (part === undefined || (rest.length && isEmpty(part))) delete copy[name];
  else copy[name] = part;
  return copy;
}
