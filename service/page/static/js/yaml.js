/**
 * Job files as YAML: block and flow mappings and lists, quoted and plain scalars. Plain ones follow JSON's rules, as in
 * `octet submit`.
 */

const PLAIN = /^[A-Za-z0-9_./~][A-Za-z0-9_./@+~-]*( [A-Za-z0-9_./@+~-]+)*$/;
const NUMBER = /^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?$/;
const INDENT = "  ";
const WIDTH = 96;

/** Write a document. Small mappings and lists stand on one line. @param {any} value */
export function toYaml(value) {
  return `${block(value, "").join("\n")}\n`;
}

/** @param {any} value @param {string} indent @returns {string[]} */
function block(value, indent) {
  if (!isNested(value)) return [indent + flow(value)];
  if (Array.isArray(value)) return value.flatMap((each) => [`${indent}- ${flow(each)}`]);
  return Object.entries(value).flatMap(([name, each]) => {
    const short = flow(each);
    if (!isNested(each) || (indent.length + name.length + short.length + 2 <= WIDTH && depth(each) === 1))
      return [`${indent}${scalar(name)}: ${short}`];
    return [`${indent}${scalar(name)}:`, ...block(each, indent + INDENT)];
  });
}

/** @param {any} value */
const isNested = (value) => value !== null && typeof value === "object" && Object.keys(value).length > 0;

/** @param {any} value @returns {number} */
const depth = (value) => (isNested(value) ? 1 + Math.max(...Object.values(value).map(depth)) : 0);

/** @param {any} value @returns {string} */
export function flow(value) {
  if (Array.isArray(value)) return `[${value.map(flow).join(", ")}]`;
  if (value === null || typeof value !== "object") return scalar(value);
  return `{${Object.entries(value)
    .map(([name, each]) => `${scalar(name)}: ${flow(each)}`)
    .join(", ")}}`;
}

/** @param {any} value */
function scalar(value) {
  if (typeof value !== "string") return JSON.stringify(value);
  return PLAIN.test(value) && typeof plain(value) === "string" ? value : JSON.stringify(value);
}

/** Read a plain scalar. @param {string} text */
function plain(text) {
  if (text === "" || text === "~" || text === "null") return null;
  if (text === "true" || text === "false") return text === "true";
  return NUMBER.test(text) ? Number(text) : text;
}

export class YamlError extends Error {
  /** @param {number} line @param {string} message */
  constructor(line, message) {
    super(`line ${line}: ${message}`);
    this.title = "This is not YAML that a job file may have";
    this.line = line;
  }
}

/** Read a document. Raises YamlError. @param {string} text */
export function fromYaml(text) {
  const lines = text
    .split(/\r?\n/)
    .map((raw, place) => ({ text: raw, number: place + 1 }))
    .filter(({ text: raw }) => !/^\s*(#.*)?$|^---\s*$/.test(raw));
  const reader = new Reader(lines);
  if (!lines.length) return null;
  const value = /^\s*[[{]/.test(lines[0].text) ? reader.flowDocument() : reader.block(indentOf(lines[0]));
  if (reader.place < lines.length) throw new YamlError(lines[reader.place].number, "indented less than the lines before it");
  return value;
}

/** @typedef {{text: string, number: number}} Line */
/** @param {Line} line */
function indentOf(line) {
  if (/^ *\t/.test(line.text)) throw new YamlError(line.number, "indented by a tab; use spaces");
  return line.text.search(/\S/);
}

class Reader {
  place = 0;

  /** @param {Line[]} lines */
  constructor(lines) {
    this.lines = lines;
  }

  flowDocument() {
    const [value, rest] = this.#flow(this.lines[0].text.trim());
    if (rest.replace(/^\s*#.*/, "").trim()) throw new YamlError(this.lines[this.place].number, `unexpected ${rest.trim()}`);
    this.place++;
    return value;
  }

  /** Read the lines of one indentation. @param {number} indent @returns {any} */
  block(indent) {
    const isList = /^\s*-(\s|$)/.test(this.lines[this.place].text);
    /** @type {any} */
    const value = isList ? [] : {};
    for (; this.place < this.lines.length; this.place++) {
      const line = this.lines[this.place];
      const at = indentOf(line);
      if (at < indent) break;
      if (at > indent) throw new YamlError(line.number, "indented more than the line before it");
      if (isList) value.push(this.#item(line, indent));
      else this.#entry(line, indent, value);
    }
    return value;
  }

  /** @param {Line} line @param {number} indent */
  #item(line, indent) {
    const [, dash, rest] = /^(\s*-\s*)(.*)$/.exec(line.text) ?? [];
    if (dash === undefined || !/^\s*-(\s|$)/.test(line.text))
      throw new YamlError(line.number, "a list goes on here, so the line needs a dash");
    if (!rest || rest.startsWith("#")) return this.#below(indent);
    if (/^("[^"]*"|'[^']*'|[^\s"'[{][^:]*):(\s|$)/.test(rest)) {
      line.text = " ".repeat(dash.length) + rest;
      const value = this.block(dash.length);
      this.place--;
      return value;
    }
    return this.#value(rest, line);
  }

  /** @param {Line} line @param {number} indent @param {Record<string, any>} into */
  #entry(line, indent, into) {
    const found = /^\s*("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^\s#"'[{:][^#:]*?)\s*:(?:\s+(.*))?$/.exec(line.text);
    if (!found) throw new YamlError(line.number, `expected name: value, got ${line.text.trim()}`);
    const name = /^["']/.test(found[1]) ? quoted(found[1], line.number)[0] : found[1];
    if (Object.hasOwn(into, name)) throw new YamlError(line.number, `${name} is given twice`);
    const rest = (found[2] ?? "").replace(/^#.*/, "");
    const value = rest ? this.#value(rest, line) : this.#below(indent, true);
    Object.defineProperty(into, name, { value, enumerable: true, writable: true, configurable: true });
  }

  /** Read what is indented below a line. A list may stand under its name. @param {number} indent @param {boolean} [isEntry] */
  #below(indent, isEntry = false) {
    const next = this.lines[this.place + 1];
    if (!next) return null;
    const deeper = indentOf(next);
    if (deeper < indent || (deeper === indent && !(isEntry && /^\s*-(\s|$)/.test(next.text)))) return null;
    this.place++;
    const value = this.block(deeper);
    this.place--;
    return value;
  }

  /** @param {string} text @param {Line} line */
  #value(text, line) {
    if (/^[&*!|>%@`]/.test(text))
      throw new YamlError(line.number, `${text[0]} has a meaning in YAML that job files do not use; quote the value`);
    const isPlain = !/^["'[{]/.test(text);
    if (isPlain) {
      const value = text.replace(/\s+#.*$/, "").trim();
      if (/:(\s|$)/.test(value)) throw new YamlError(line.number, "a second colon; quote the value");
      return plain(value);
    }
    const [value, rest] = this.#flow(text);
    if (rest.replace(/^\s+#.*/, "").trim()) throw new YamlError(this.lines[this.place].number, `unexpected ${rest.trim()}`);
    return value;
  }

  /**
   * Read a value in braces, brackets or quotes, which may go on in the next lines.
   * @param {string} text @returns {[any, string]}
   */
  #flow(text) {
    text = this.#more(text);
    const number = this.lines[this.place].number;
    if (/^["']/.test(text)) return quoted(text, number);
    if (!/^[[{]/.test(text)) {
      const found = /^([^,[\]{}#]*?)\s*(?=[,\]}]|:\s|:$|$)/.exec(text);
      if (!found) throw new YamlError(number, `cannot read ${text}`);
      return [plain(found[1].trim()), text.slice(found[0].length)];
    }
    const [isList, end] = [text[0] === "[", text[0] === "[" ? "]" : "}"];
    /** @type {any} */
    const value = isList ? [] : {};
    for (let rest = this.#more(text.slice(1)); ;) {
      if (rest.startsWith(end)) return [value, rest.slice(1)];
      let item;
      [item, rest] = this.#flow(rest);
      rest = this.#more(rest);
      if (isList) value.push(item);
      else {
        if (!rest.startsWith(":")) throw new YamlError(number, `${item} has no value; write name: value`);
        if (Object.hasOwn(value, item)) throw new YamlError(number, `${item} is given twice`);
        [value[String(item)], rest] = this.#flow(rest.slice(1));
        rest = this.#more(rest);
      }
      if (rest.startsWith(",")) rest = this.#more(rest.slice(1));
      else if (!rest.startsWith(end))
        throw new YamlError(this.lines[this.place].number, `expected , or ${end}, got ${rest || "the end"}`);
    }
  }

  /** Skip blanks, comments and ends of lines. @param {string} text */
  #more(text) {
    text = text.replace(/^\s*(#.*)?/, "");
    while (!text) {
      if (this.place + 1 >= this.lines.length) throw new YamlError(this.lines[this.place].number, "a bracket is not closed");
      text = this.lines[++this.place].text.replace(/^\s*(#.*)?/, "");
    }
    return text;
  }
}

/** Read a quoted scalar. @param {string} text @param {number} number @returns {[string, string]} */
function quoted(text, number) {
  const found = (text[0] === '"' ? /^"(?:[^"\\]|\\.)*"/ : /^'(?:[^']|'')*'/).exec(text);
  if (!found) throw new YamlError(number, "a quote is not closed");
  const rest = text.slice(found[0].length);
  if (text[0] === "'") return [found[0].slice(1, -1).replaceAll("''", "'"), rest];
  try {
    return [JSON.parse(found[0]), rest];
  } catch {
    throw new YamlError(number, `${found[0]} has an escape that JSON does not have`);
  }
}
