/**
 * What can be done with a job: pause, resume, retry, cancel and delete it, clone it, take its spec along, compare it. A
 * comparison is paused, resumed and cancelled.
 */

import { ask, headers, key } from "./api.js";
import { fill, h, mark, problem } from "./dom.js";
import { bytes } from "./figures.js";
import { isOver } from "./levels.js";
import { go } from "./main.js";
import { send } from "./requests.js";
import { toYaml } from "./yaml.js";

/** @typedef {import("octet-types").Job} Job */
/** @typedef {import("octet-types").Comparison} Comparison */

/** Build a job's buttons. @param {Job} job @returns {HTMLElement[]} */
export function actions(job) {
  return [
    command(job, "pause", "Pause"),
    command(job, "resume", "Resume"),
    command(job, "retry", "Retry"),
    danger("cancel", "Cancel", () => confirmCancel(job)),
    danger("delete", "Delete", () => confirmDelete(job)),
    h("a", { class: "button", href: `/submit?from=${job.id}` }, "Clone"),
    h("a", { class: "button", href: `/compare?jobs=${job.id}` }, "Compare"),
    h("button", { type: "button", onclick: () => showSpec(job) }, "Copy as…"),
  ];
}

/**
 * Build a comparison's buttons. No stream tells of it, so it is read again after each.
 * @param {Comparison} comparison @param {() => void} onDone @returns {HTMLElement[]}
 */
export function comparisonActions(comparison, onDone) {
  return [
    command(comparison, "pause", "Pause", onDone),
    command(comparison, "resume", "Resume", onDone),
    danger("cancel", "Cancel", () => confirmCancel(comparison, onDone)),
  ];
}

/** @param {Job | Comparison} item */
const pathOf = (item) => `/v1/${item.object}s/${item.id}`;

/**
 * Build a button that needs no confirmation, because it can be taken back.
 * @param {Job | Comparison} item @param {string} name @param {string} label @param {() => void} [onDone]
 */
function command(item, name, label, onDone = () => {}) {
  const button = h(
    "button",
    {
      type: "button",
      onclick: async () => {
        button.disabled = true;
        await send(`${pathOf(item)}/${name}`, {}).catch((error) => open(`${label} is not possible`, problem(error)));
        button.disabled = false;
        onDone();
      },
    },
    label,
  );
  mark(button, "data-action", name);
  return button;
}

/** Build a button that asks first. @param {string} name @param {string} label @param {() => void} onclick */
function danger(name, label, onclick) {
  const button = h("button", { type: "button", class: "danger", onclick }, label);
  mark(button, "data-action", name);
  return button;
}

const WAITING = ["queued", "starting", "running"];

/** Show the buttons that the job's state allows. @param {HTMLElement} head */
export function drawActions(head) {
  const { state } = /** @type {HTMLElement & {dataset: {state: string}}} */ (head.querySelector(".now")).dataset;
  const over = isOver(state) || state === "finished" || state === "too_wild";
  const allowed = {
    pause: WAITING.includes(state),
    resume: state === "paused",
    retry: state === "failed" || state === "cancelled",
    cancel: !over,
    delete: over,
  };
  for (const [name, isAllowed] of Object.entries(allowed)) {
    const button = head.querySelector(`[data-action=${name}]`);
    if (button) mark(button, "hidden", isAllowed ? null : "");
  }
}

/** @param {Job | Comparison} item @param {() => void} [onDone] */
function confirmCancel(item, onDone = () => {}) {
  const save = h("input", { type: "checkbox", checked: true });
  const stops =
    item.object === "job"
      ? "stops at the end of its step. Its curve and checkpoints stay."
      : "starts no more jobs, and those that it has stop. What the others have shown stays.";
  confirm(
    `Cancel this ${item.object}?`,
    `Cancel the ${item.object}`,
    () => send(`${pathOf(item)}/cancel${save.checked ? "" : "?save=false"}`, {}).then(onDone),
    h("p", {}, `${item.name} ${stops}`),
    h("label", {}, save, " Save a checkpoint first"),
  );
}

/** @param {Job} job */
function confirmDelete(job) {
  confirm(
    "Delete this job?",
    "Delete the job",
    async () => {
      await ask(`/v1/jobs/${job.id}`, { method: "DELETE" });
      go("/");
    },
    h("p", {}, `${job.name}, its curve, its log and its checkpoints go for good.`),
  );
}

/**
 * Ask before something is done, and say why it could not be.
 * @param {string} title @param {string} label @param {() => Promise<any>} act @param {...HTMLElement} children
 */
function confirm(title, label, act, ...children) {
  const note = h("div");
  const button = h(
    "button",
    {
      type: "button",
      class: "danger",
      onclick: async () => {
        button.disabled = true;
        try {
          await act();
          dialog.close();
        } catch (error) {
          fill(note, problem(error));
          button.disabled = false;
        }
      },
    },
    label,
  );
  const dialog = open(title, ...children, note, button);
}

/** Show a job's spec without what is a default anyway. @param {Job} job */
async function showSpec(job) {
  const copies = h("div", { class: "copies" }, "Loading…");
  open("Take this job along", copies);
  try {
    const { JobSchema, schemas } = await import("./schema.js");
    const spec = new JobSchema(await schemas()).prune(job.spec);
    fill(copies, copy("Job file, for octet submit", toYaml(spec)), copy("The same as curl", curlOf(spec)));
  } catch (error) {
    fill(copies, problem(error));
  }
}

/** Write a submission as a command. @param {unknown} spec @param {string} [path] */
export function curlOf(spec, path = "/v1/jobs") {
  const body = JSON.stringify(spec).replaceAll("'", "'\\''");
  const secret = key() ? ` -H "Authorization: Bearer $OCTET_API_KEY"` : "";
  return `curl ${location.origin}${path} -H 'Content-Type: application/json'${secret} \\\n  -d '${body}'`;
}

/** Build a text that can be copied. @param {string} title @param {string} text */
export function copy(title, text) {
  const block = h("pre", { tabindex: 0, "aria-label": title }, text);
  const button = h(
    "button",
    {
      type: "button",
      class: "plain",
      onclick: async () => {
        getSelection()?.selectAllChildren(block);
        // A page over plain HTTP from another machine has no clipboard; there the text is selected for the keys.
        const isDone = await navigator.clipboard?.writeText(text).then(
          () => true,
          () => false,
        );
        button.textContent = isDone ? "Copied" : "Selected: press Ctrl+C";
      },
    },
    "Copy",
  );
  return h("section", {}, h("div", { class: "titled" }, h("h3", {}, title), button), block);
}

/**
 * List the files of a checkpoint or an export for download; of an export, also all in one.
 * @param {import("octet-types").Checkpoint | import("octet-types").Export} saved
 */
export async function openFiles(saved) {
  const { job_id, id, step } = saved;
  const list = h("ul", { class: "files" }, h("li", {}, "Loading…"));
  open(`Files of step ${step}`, list);
  const folder = `/v1/jobs/${job_id}/${saved.object}s/${id}`;
  const path = `${folder}/files`;
  try {
    const { data } = await ask(path);
    fill(
      list,
      data.map((/** @type {{path: string, num_bytes: number}} */ file) =>
        h("li", {}, fileLink(`${path}/${file.path}`, file.path), ` ${bytes(file.num_bytes)}`),
      ),
      "name" in saved ? h("li", {}, fileLink(`${folder}/archive`, `${saved.name}.tar`), " all of them") : "",
    );
  } catch (error) {
    fill(list, problem(error));
  }
}

/**
 * Build a link to a file. A link sends no key, so where there is one the file is fetched first.
 * @param {string} path @param {string} name
 */
function fileLink(path, name) {
  const link = h("a", { href: path, download: name.replaceAll("/", "-") }, name);
  if (!key()) return link;
  link.addEventListener("click", async (event) => {
    if (link.href.startsWith("blob:")) return;
    event.preventDefault();
    const answer = await fetch(path, { headers: headers() });
    link.href = URL.createObjectURL(await answer.blob());
    link.click();
  });
  return link;
}

/** Open a dialog. @param {string} title @param {...HTMLElement} children */
function open(title, ...children) {
  const close = h("button", { type: "button", onclick: () => dialog.close() }, "Close");
  const dialog = h("dialog", { "aria-label": title, onclose: () => dialog.remove() }, h("h2", {}, title), ...children, close);
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}
