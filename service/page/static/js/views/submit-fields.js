/** Which fields of a job a person fills in first, and which stand behind “More”. */

import { h, panel } from "../dom.js";

/**
 * Build the parts of the form. `levels` and `data` have the parts that change with the document.
 * @param {import("../form.js").Form} form @param {import("../schema.js").JobSchema} schema
 * @param {import("./submit.js").Catalog} catalog @param {HTMLElement[]} levels @param {HTMLElement} data
 */
export function sections(form, schema, catalog, levels, data) {
  const of = schema.root.properties;
  const training = schema.shape(of.training, {}).properties;
  const resources = schema.shape(of.resources, {}).properties;
  const presets = catalog.families.flatMap(({ presets: list }) => list.map((/** @type {{name: string}} */ each) => each.name));
  const preset = form.field(
    "model.preset",
    { type: "string", description: "Sizes of your own, other families and paths: in the job file." },
    { label: "model", options: presets },
  );
  const first = new Set([
    "training.steps",
    "training.epochs",
    "training.global_batch_size",
    "training.sequence_length",
    "training.optimizer.learning_rate",
    "training.schedule.warmup_steps",
    "training.eval_every",
    "training.checkpoint_every",
    "training.seed",
  ]);
  const optimizer = schema.shape(training.optimizer, {}).properties;
  const schedule = schema.shape(training.schedule, {}).properties;
  const plain = /** @type {[string, any][]} */ (
    ["steps", "global_batch_size", "sequence_length", "eval_every", "checkpoint_every", "seed"].map((name) => [
      `training.${name}`,
      training[name],
    ])
  );
  const shown = [
    ...plain.slice(0, 3),
    ["training.optimizer.learning_rate", optimizer.learning_rate],
    ["training.schedule.warmup_steps", schedule.warmup_steps],
    ...plain.slice(3),
  ];
  const more = (/** @type {string} */ title, /** @type {HTMLElement[]} */ fields) =>
    h("details", {}, h("summary", {}, title), h("div", { class: "fields" }, fields));
  return [
    panel(
      "Job",
      h(
        "div",
        { class: "fields" },
        form.field("name", of.name),
        preset,
        form.field("resources.pool", resources.pool, { label: "pool", options: catalog.pools.map(({ name }) => name) }),
        form.field("resources.workers", resources.workers, { label: "workers" }),
      ),
    ),
    panel(
      "Precision",
      ...levels,
      more("More of precision", form.fields("precision", of.precision, {}, new Set(["precision.level"]))),
    ),
    panel("Data", data),
    panel(
      "Training",
      h(
        "div",
        { class: "fields" },
        shown.map(([path, each]) => form.field(path, each)),
      ),
      more("More of training", form.fields("training", of.training, {}, first)),
    ),
    panel(
      "Operation",
      h(
        "div",
        { class: "fields" },
        form.field("priority", of.priority),
        form.field("retry.max_failures", schema.shape(of.retry, {}).properties.max_failures, {
          label: "retries after failures",
        }),
      ),
      more("Parallelism", form.fields("parallelism", of.parallelism, {}, new Set())),
    ),
  ];
}
