/** Which view stands at an address. `shell.js` has the rest of the frame, and comes after the first view. */

import { fill, h, mark, problem } from "./dom.js";

/**
 * @typedef {{root: HTMLElement, id: string, query: URLSearchParams, signal: AbortSignal,
 *   keys: Record<string, () => void>}} Place
 */

/** @type {[RegExp, string, string][]} */
const VIEWS = [
  [/^\/$/, "jobs", "Jobs"],
  [/^\/jobs\/([^/]+)$/, "job", "Job"],
  [/^\/compare$/, "compare", "Compare"],
  [/^\/comparisons\/([^/]+)$/, "comparison", "Comparison"],
  [/^\/submit$/, "submit", "Submit"],
  [/^\/cluster$/, "cluster", "Cluster"],
];
export const main = /** @type {HTMLElement} */ (document.getElementById("main"));

export let leaving = new AbortController();
/** @type {Record<string, () => void>} */
export let keys = {};

/** Show the view that stands at the present address, in place of the one before. */
export async function show() {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const path = location.pathname;
  const scroll = history.state?.scroll ?? 0;
  const [pattern, name, title] = VIEWS.find(([each]) => each.test(path)) ?? [/$/, "", "Not found"];
  const id = decodeURIComponent(pattern.exec(path)?.[1] ?? "");
  const root = h("div", { class: `view ${name}` });
  keys = {};
  document.title = `${title} · Octet`;
  for (const link of document.querySelectorAll("nav a")) {
    mark(link, "aria-current", link.getAttribute("href") === path ? "page" : null);
  }
  fill(main, root);
  main.setAttribute("aria-busy", "true");
  try {
    if (!name) throw Object.assign(new Error(`There is no page ${path}.`), { title: "Not found" });
    const view = await import(`./views/${name}.js`);
    if (!signal.aborted) await view.show({ root, id, query: new URLSearchParams(location.search), signal, keys });
  } catch (error) {
    if (signal.aborted) return;
    if (!root.querySelector("h1")) root.append(h("h1", {}, title));
    root.append(problem(error instanceof TypeError && /import/.test(error.message) ? outdated() : error));
    if (!(error instanceof Error && "status" in error)) console.error(error);
  }
  if (signal.aborted) return;
  main.setAttribute("aria-busy", "false");
  scrollTo(0, scroll);
}

const outdated = () =>
  Object.assign(new Error("The server has another version of this page now. Reload it."), { title: "Reload the page" });

/** Go to another address. @param {string} address */
export function go(address) {
  keepScroll();
  history.pushState({}, "", address);
  show();
  main.focus({ preventScroll: true });
}

/** Write filters, zoom and choices into the address without going anywhere. @param {Record<string, any>} changes */
export function remember(changes) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes)) {
    query.delete(name);
    for (const each of [value].flat()) if (each !== "" && each != null && each !== false) query.append(name, String(each));
  }
  const text = query.toString().replaceAll("%2C", ",");
  history.replaceState(history.state, "", text ? `?${text}` : location.pathname);
}

const keepScroll = () => history.replaceState({ ...history.state, scroll: scrollY }, "");

/** @param {MouseEvent} event */
function followLink(event) {
  const link = /** @type {Element} */ (event.target).closest("a");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey)
    return;
  const path = link.getAttribute("href") ?? "";
  if (link.target || link.hasAttribute("download") || !VIEWS.some(([each]) => path[0] === "/" && each.test(path.split("?")[0])))
    return;
  event.preventDefault();
  go(path);
}

history.scrollRestoration = "manual";
addEventListener("popstate", show);
addEventListener("click", followLink);
addEventListener("scrollend", keepScroll);
addEventListener("pageshow", (event) => {
  if (event.persisted) show();
});
addEventListener("octet-key-needed", async () => (await import("./shell.js")).askForKey());
show().then(() => import("./shell.js"));
