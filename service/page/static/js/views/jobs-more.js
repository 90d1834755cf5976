/**
 * What the list of jobs needs after it was painted: changes, keys, the choice for a comparison, words where there is no
 * job.
 */

import { fill, h } from "../dom.js";
import { watch } from "../live.js";
import { go, remember } from "../main.js";
import { every, paced } from "../pace.js";
import { drawPools } from "./jobs.js";

/** @typedef {import("../joblist.js").Jobs} Jobs */

/** Follow the jobs, and answer keys. @param {import("./jobs.js").View} view @param {import("../main.js").Place} place */
export function enliven({ root, jobs, chosen, at, rows, table, pools }, { signal, keys }) {
  const bar = h("div", { class: "choice", role: "status", hidden: true });
  root.append(bar);
  const compared = () => (chosen.size ? `/compare?jobs=${[...chosen].join(",")}` : "/compare");
  const choose = () => {
    bar.hidden = chosen.size === 0;
    fill(
      bar,
      h("span", {}, `${chosen.size} ${chosen.size === 1 ? "job" : "jobs"} chosen`),
      h("a", { class: "button main", href: compared() }, "Compare ", h("kbd", {}, "c")),
      h(
        "button",
        {
          class: "plain",
          onclick: () => {
            chosen.clear();
            choose();
          },
        },
        "Clear",
      ),
    );
    remember({ chosen: [...chosen] });
    rows.draw();
  };
  table.addEventListener("change", choose, { signal });
  if (chosen.size) choose();
  const showPools = paced(() => drawPools(pools, signal), signal);
  jobs.onNews = paced(jobs.onChange, signal);
  every(
    10,
    () => {
      jobs.forget();
      rows.draw();
      showPools();
    },
    signal,
  );
  jobs.onReload = () =>
    watch(
      { list: jobs.list },
      (messages) => {
        if (messages.some(({ kind }) => kind === "rows")) showPools();
        jobs.receive(messages);
      },
      signal,
    );
  jobs.onReload();
  const move = (/** @type {number} */ by) => {
    at.index = Math.max(0, Math.min(jobs.total - 1, at.index + by));
    rows.reveal(at.index);
  };
  const row = () => jobs.rows[at.index];
  Object.assign(keys, {
    "/": () => document.getElementById("q")?.focus(),
    j: () => move(1),
    k: () => move(-1),
    Enter: () => {
      const job = row();
      if (job) go(`/jobs/${job.id}`);
    },
    x: () => {
      const job = row();
      if (!job) return;
      if (!chosen.delete(job.id)) chosen.add(job.id);
      choose();
    },
    c: () => go(compared()),
  });
}

/** Build the words for a list without jobs: how to start one, or which filter hides them. @param {Jobs} jobs */
export function nothing(jobs) {
  if (!jobs.isFiltered) {
    return h(
      "div",
      {},
      h("h2", {}, "No job yet"),
      h("p", {}, h("a", { href: "/submit" }, "The form"), " has a small one ready to submit."),
      h("p", {}, "Or in a terminal, where the sources are:"),
      h("pre", {}, "octet submit examples/gpt-tiny.yaml\noctet list"),
    );
  }
  const { q, state, level, pool, label } = jobs.filters;
  const words = [q && `“${q}”`, state, level && `level ${level}`, pool && `pool ${pool}`, label && `label ${label}`];
  return h(
    "div",
    {},
    h("h2", {}, "No job matches"),
    h("p", {}, words.filter(Boolean).join(", ")),
    h("a", { class: "button", href: "/" }, "Show all jobs"),
  );
}
