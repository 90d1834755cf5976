/** The jobs of a comparison as chips, with a field to add one. */

import { address, ask } from "../api.js";
import { fill, h } from "../dom.js";
import { badge, stateBadge } from "../levels.js";
import { go } from "../main.js";

export const MOST = 8;

/** Build the list of chosen jobs with a field to add one. @param {string[]} ids @param {AbortSignal} signal */
export function chooser(ids, signal) {
  const chips = h("div", { class: "chips" });
  const list = h("datalist", { id: "candidates" });
  const to = (/** @type {string[]} */ chosen) => go(chosen.length ? `/compare?jobs=${chosen.join(",")}` : "/compare");
  const field = h("input", {
    list: "candidates",
    placeholder: "Add a job: its name or id",
    "aria-label": "Add a job",
    disabled: ids.length >= MOST,
    onchange: async () => {
      const found =
        /job_\w+/.exec(field.value)?.[0] ??
        (await ask(address("/v1/rows", { q: field.value, limit: 1 }), { signal })).data[0]?.id;
      if (found) to([...ids, found]);
    },
    onfocus: async () => {
      const { data } = await ask(address("/v1/rows", { limit: 50 }), { signal });
      fill(
        list,
        data.map((/** @type {import("octet-types").Row} */ row) =>
          h("option", { value: `${row.name} ${row.id}` }, `${row.level} · ${row.state}`),
        ),
      );
    },
  });
  if (ids.length) {
    ask(address("/v1/rows", { id: ids }), { signal })
      .then(({ data }) =>
        fill(
          chips,
          ids.map((id) => {
            const row = data.find((/** @type {{id: string}} */ each) => each.id === id);
            const remove = h(
              "button",
              {
                type: "button",
                class: "plain",
                "aria-label": `Remove ${row?.name ?? id}`,
                onclick: () => to(ids.filter((each) => each !== id)),
              },
              "×",
            );
            return h(
              "span",
              { class: "chip" },
              row ? [badge(row.level), h("a", { href: `/jobs/${id}` }, row.name), stateBadge(row.state)] : id,
              remove,
            );
          }),
        ),
      )
      .catch(() => {});
  }
  return h("div", { class: "chooser" }, chips, field, list);
}
