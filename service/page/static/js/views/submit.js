/**
 * Submit a job, or a comparison of it at several levels: a form made from the schema beside the same document as YAML,
 * checked and planned by the service while one types.
 */

import { ask } from "../api.js";
import { copy, curlOf } from "../actions.js";
import { fill, h, panel, problem } from "../dom.js";
import { compact } from "../figures.js";
import { count } from "../format.js";
import { Form } from "../form.js";
import { go } from "../main.js";
import { send } from "../requests.js";
import { JobSchema, schemas, withValue } from "../schema.js";
import { fromYaml, toYaml } from "../yaml.js";
import { ComparisonChoice } from "./submit-compare.js";
import { sections } from "./submit-fields.js";
import { LevelChoice } from "./submit-level.js";
import { PlanBeside } from "./submit-plan.js";

/** @typedef {{families: any[], levels: import("octet-types").Level[], pools: import("octet-types").Pool[]}} Catalog */

const BEGIN = {
  name: "my-first-job",
  model: { preset: "gpt-tiny" },
  precision: { level: "O2" },
  data: { path: "/usr/share/doc", include: ["**/copyright", "**/*.txt"] },
  training: {
    steps: 100,
    global_batch_size: 8,
    sequence_length: 128,
    optimizer: { learning_rate: 3e-3 },
    schedule: { warmup_steps: 10 },
    eval_every: 25,
  },
};
const PAUSE_MS = 350;

/** @param {import("../main.js").Place} place */
export async function show({ root, query, signal }) {
  const from = query.get("from");
  const [all, families, levels, pools, source] = await Promise.all([
    schemas(),
    ...["models", "levels", "pools"].map((name) => ask(`/v1/${name}`, { signal })),
    from ? ask(`/v1/jobs/${from}`, { signal }) : null,
  ]);
  const schema = new JobSchema(all);
  const begin = source ? schema.prune({ ...source.spec, name: source.name, labels: own(source.spec.labels) }) : BEGIN;
  const catalog = { families: families.data, levels: levels.data, pools: pools.data };
  const page = new Submission(schema, catalog, begin, query, signal);
  root.append(h("h1", {}, source ? `Clone of ${source.name}` : "Submit a job"), page.element);
  page.start();
}

/** Leave out the labels that a comparison gives its children. @param {Record<string, string>} labels */
const own = ({ comparison, arm, seed, ...others }) =>
  comparison ? others : { ...(arm && { arm }), ...(seed && { seed }), ...others };

class Submission {
  #waiting = 0;
  #version = 0;
  #once = secret();

  /**
   * @param {JobSchema} schema @param {Catalog} catalog @param {any} document @param {URLSearchParams} query
   * @param {AbortSignal} signal
   */
  constructor(schema, catalog, document, query, signal) {
    this.schema = schema;
    this.catalog = catalog;
    this.document = document;
    this.signal = signal;
    this.form = new Form(schema, (path, value) => this.change(path, value));
    this.level = new LevelChoice(catalog, (level) => this.change("precision.level", level));
    this.compared = new ComparisonChoice(schema, catalog, query, () => this.#changed());
    this.plan = new PlanBeside(signal);
    this.text = h("textarea", {
      id: "yaml",
      rows: 24,
      spellcheck: "false",
      "aria-label": "The job as YAML",
      oninput: () => this.#typed(),
    });
    this.result = h("div", { class: "result", role: "status" });
    this.button = h("button", { type: "submit", class: "main" }, "Submit the job");
    this.curl = h("details", {}, h("summary", {}, "The same as curl"));
    this.curl.addEventListener("toggle", () => this.#showCurl());
    this.data = h("div", { class: "fields" });
    const side = h(
      "div",
      { class: "side yaml" },
      panel("The same as a job file", this.text, this.result, h("div", { class: "buttons" }, this.button), this.curl),
      this.plan.element,
    );
    this.element = h(
      "form",
      {
        class: "halves submit",
        novalidate: true,
        onsubmit: (/** @type {Event} */ event) => {
          event.preventDefault();
          this.submit();
        },
      },
      h(
        "div",
        { class: "rest" },
        ...sections(this.form, schema, catalog, [this.level.element, this.compared.element], this.data),
      ),
      side,
    );
  }

  start() {
    this.text.value = toYaml(this.document);
    this.#changed();
  }

  #changed() {
    this.#show();
    this.#soon();
  }

  /** Take a change of the form. @param {string} path @param {any} value */
  change(path, value) {
    this.document = withValue(this.document, path, value);
    this.text.value = toYaml(this.document);
    this.#changed();
  }

  #typed() {
    try {
      this.document = fromYaml(this.text.value) ?? {};
    } catch (error) {
      this.#version++;
      clearTimeout(this.#waiting);
      this.button.disabled = true;
      fill(this.result, problem(error));
      return;
    }
    this.#changed();
  }

  #show() {
    const { schema, form, document } = this;
    const source = document?.data?.source ?? "text";
    if (this.data.dataset.source !== source) {
      this.data.dataset.source = source;
      form.forget("data");
      const members = schema
        .plain(schema.root.properties.data)
        .oneOf.map((/** @type {any} */ each) => schema.plain(each).properties.source.const);
      const rest = form.fields("data", schema.root.properties.data, document?.data ?? {}, new Set(["data.source"]));
      fill(this.data, form.field("data.source", { type: "string", default: "text" }, { options: members }), rest);
    }
    form.show(document);
    this.level.show(document);
    this.button.textContent = this.compared.isChosen ? "Start the comparison" : "Submit the job";
    this.#once = secret();
    this.#showCurl();
  }

  #showCurl() {
    if (!this.curl.open) return;
    const comparison = this.compared.of(this.document);
    const command = comparison ? curlOf(comparison, "/v1/comparisons") : curlOf(this.document);
    const short = comparison ? copy("With this job file as job.yaml", this.compared.command) : "";
    fill(this.curl, h("summary", {}, "The same as curl"), copy("One command", command), short);
  }

  #soon() {
    this.#version++; // an answer to what was here before does not count
    this.button.disabled = true;
    clearTimeout(this.#waiting);
    this.#waiting = setTimeout(() => this.#check(), PAUSE_MS);
  }

  /** Let the service check the document as a submission would be. */
  async #check() {
    const version = this.#version;
    const [first, ...others] = this.compared.levels;
    if (first && !others.length && !this.compared.varies)
      return fill(this.result, h("p", { class: "bad" }, "Choose a second level to compare with, or vary a field."));
    const job = first ? withValue(this.document, "precision.level", first) : this.document;
    try {
      const valid = await send("/v1/jobs/validate", job, { signal: this.signal });
      if (version !== this.#version) return;
      this.#mark([]);
      this.plan.show(job, this.compared.levels);
      const recipe = valid.recipe ? `; ${valid.recipe.scaling} scaling of FP8` : "";
      const parameters = valid.num_parameters === null ? "" : `${compact(valid.num_parameters)} parameters, `;
      fill(
        this.result,
        h("p", { class: "good" }, "✓ It can run. "),
        h(
          "p",
          { class: "muted" },
          `${parameters}${count(valid.tokens_per_step)} tokens a step in micro-batches of ${valid.micro_batch_size}${recipe}.`,
        ),
      );
      this.button.disabled = false;
    } catch (error) {
      if (version === this.#version && !this.signal.aborted) this.#complain(error);
    }
  }

  /** @param {unknown} error */
  #complain(error) {
    this.#mark(/** @type {{errors?: any[]}} */ (error).errors ?? []);
    fill(this.result, problem(error));
  }

  /** Show errors at their fields; those of a comparison's job have its fields below `job`. @param {any[]} errors */
  #mark(errors) {
    this.form.complain(errors.map((each) => ({ ...each, field: each.field.replace(/^job\./, "") })));
    this.compared.form.complain(errors);
  }

  /** Send it. The key is the document's own, so a second send is the same job. */
  async submit() {
    if (this.button.disabled) return;
    this.button.disabled = true;
    try {
      const comparison = this.compared.of(this.document);
      const kind = comparison ? "comparisons" : "jobs";
      const { id } = await send(`/v1/${kind}`, comparison ?? this.document, { once: this.#once });
      go(`/${kind}/${id}`);
    } catch (error) {
      this.#complain(error);
      this.button.disabled = false;
    }
  }
}

/** Draw a random word. randomUUID is missing on a page over plain HTTP from another machine. */
const secret = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
