/** The list of comparisons that the service runs and has run: one job in several arms, paired by seed. */

import { address, ask } from "../api.js";
import { fill, h, panel, problem } from "../dom.js";
import { clock } from "../figures.js";
import { stateBadge } from "../levels.js";
import { every, paced } from "../pace.js";
import { grid } from "./job-more.js";

/** @typedef {import("octet-types").Comparison} Comparison */

const PAGE = 20;
const COLUMNS = ["Name", "State", "Arms", "Seeds, at most", "Submitted", "Why it is over"];

/**
 * Show a page of comparisons, newest first, and what starts one.
 * @param {HTMLElement} root @param {URLSearchParams} query @param {AbortSignal} signal
 */
export async function list(root, query, signal) {
  const after = query.get("after");
  const part = panel("Comparisons");
  root.append(part);
  const title = /** @type {HTMLElement} */ (part.querySelector("h2"));
  const read = async () => {
    const page = await ask(address("/v1/comparisons", { limit: PAGE, after }), { signal });
    const words = JSON.stringify(page);
    if (part.dataset.words === words) return;
    part.dataset.words = words;
    fill(part, title, page.data.length ? table(page) : nothing());
  };
  const refresh = () =>
    read().catch((error) => {
      if (signal.aborted) return;
      delete part.dataset.words;
      fill(part, title, problem(error));
    });
  await refresh();
  every(5, paced(refresh, signal), signal);
}

/** @param {{data: Comparison[], has_more: boolean, last_id: string}} page */
function table({ data, has_more, last_id }) {
  const rows = data.map((each) => [
    h("a", { href: `/comparisons/${each.id}` }, each.name),
    stateBadge(each.state),
    variedOf(each),
    String(each.spec.seeds),
    clock(each.created_at),
    each.message ?? "",
  ]);
  return [
    grid("Comparisons", COLUMNS, rows, 9),
    has_more ? h("p", {}, h("a", { href: address("/compare", { after: last_id }) }, "Older comparisons")) : null,
    h("p", { class: "muted" }, "Jobs that are there already: choose them in ", jobs(), ", then Compare."),
  ];
}

/** Say what a comparison varies. @param {Comparison} comparison */
export function variedOf({ spec }) {
  const fields = Object.entries(spec.vary ?? {}).map(
    ([path, values]) => `${path.split(".").at(-1)} ${values.map(String).join(", ")}`,
  );
  return [spec.levels?.join(", "), ...fields].filter(Boolean).join(" × ");
}

const jobs = () => h("a", { href: "/" }, "the list of jobs");

const nothing = () =>
  h(
    "div",
    { class: "empty" },
    h(
      "div",
      {},
      h("h2", {}, "No comparison here yet"),
      h("p", {}, "Which level is safe for your model, and what does it save? This trains each with the same seeds:"),
      h("pre", { tabindex: 0, role: "region", "aria-label": "Command" }, "octet compare job.yaml --levels fp32,O2 --seeds 5"),
      h("p", {}, "Or start one in ", h("a", { href: "/submit?levels=fp32,O2" }, "the form"), "."),
      h("p", {}, "Jobs that are there already: choose them in ", jobs(), " with their boxes or ", h("kbd", {}, "x"), "."),
    ),
  );
