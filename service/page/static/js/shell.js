/** The frame around a view: the keys, the theme, the state of the connection, the form for the API key. */

import { ask, key, setKey } from "./api.js";
import { fill, h, say } from "./dom.js";
import { onStatus } from "./live.js";
import { go, keys, leaving, main, show } from "./main.js";

const THEMES = ["", "light", "dark"];
const PAGES = /** @type {Record<string, string>} */ ({ j: "/", c: "/compare", s: "/submit", l: "/cluster" });
const SHORTCUTS = [
  ["/", "search"],
  ["j  k", "next, previous job"],
  ["Enter", "open it"],
  ["x", "choose it for a comparison"],
  ["c", "compare the chosen ones"],
  ["g j", "Jobs"],
  ["g c", "Compare"],
  ["g s", "Submit"],
  ["g l", "Cluster"],
  ["←  →", "on a chart: move the cursor"],
  ["+  −", "on a chart: zoom"],
  ["Esc", "on a chart: the whole curve again"],
  ["?", "this list"],
];

let began = "";

/** @param {KeyboardEvent} event */
function pressed(event) {
  const target = /** @type {HTMLElement} */ (event.target);
  if (event.metaKey || event.ctrlKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (target.matches("input:not([type=checkbox]), textarea, select")) {
    if (event.key === "Escape") target.blur();
    return;
  }
  const name = began + event.key;
  began = "";
  if (event.key === "?") openHelp();
  else if (name === "g") began = "g ";
  else if (name.startsWith("g ") && PAGES[event.key]) go(PAGES[event.key]);
  else if (keys[name] && !(event.key === "Enter" && target.matches("a, button, summary"))) keys[name]();
  else return;
  event.preventDefault();
}

function openHelp() {
  const rows = SHORTCUTS.map(([press, does]) => [
    h(
      "dt",
      {},
      press.split("  ").map((each) => h("kbd", {}, each)),
    ),
    h("dd", {}, does),
  ]);
  const dialog = h(
    "dialog",
    { "aria-label": "Keys", onclose: () => dialog.remove() },
    h("h2", {}, "Keys"),
    h("dl", { class: "keys" }, rows.flat()),
    h("form", { method: "dialog" }, h("button", { class: "plain" }, "Close")),
  );
  document.body.append(dialog);
  dialog.showModal();
}

const command = () => `octet login --token --url ${location.origin}`;

/** Build the form that asks for the API key. */
function keyForm() {
  const field = h("input", { type: "password", id: "key", autocomplete: "off", required: true, size: 40 });
  const wrong = key() ? h("p", { class: "bad", role: "alert" }, "The server does not know the key that this tab had.") : null;
  const people = h("p");
  ask("/v1/sign-in").then(
    ({ issuer }) => fill(people, "People sign in at ", issuer, ": enter what ", h("code", {}, command()), " prints."),
    () => people.remove(), // the server has no identity provider
  );
  const enter = (/** @type {Event} */ event) => {
    event.preventDefault();
    setKey(field.value.trim());
    show();
  };
  return h(
    "form",
    { class: "panel key", onsubmit: enter },
    h("h1", {}, "This server asks for an API key"),
    wrong,
    h("p", {}, "Its operator gives keys out. It stays in this tab until you close it."),
    people,
    h("label", { for: "key" }, "API key"),
    field,
    h("button", { class: "main" }, "Enter"),
  );
}

/** Put the form for the API key in place of the view. */
export function askForKey() {
  if (main.querySelector("form.key")) return;
  leaving.abort();
  fill(main, keyForm());
  main.setAttribute("aria-busy", "false");
  main.querySelector("input")?.focus();
}

function turnTheme() {
  const root = document.documentElement;
  const next = THEMES[(THEMES.indexOf(root.dataset.theme ?? "") + 1) % THEMES.length];
  if (next) localStorage.setItem("octet-theme", next);
  else localStorage.removeItem("octet-theme");
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
  nameTheme();
  dispatchEvent(new CustomEvent("octet-theme"));
}

function nameTheme() {
  const button = /** @type {HTMLElement} */ (document.getElementById("theme"));
  const name = document.documentElement.dataset.theme ?? "as the system";
  button.textContent = { light: "☀", dark: "☾" }[name] ?? "◐";
  button.setAttribute("aria-label", `Theme: ${name}. Change it`);
  button.title = `Theme: ${name}`;
}

onStatus(({ state, since }) => {
  const element = /** @type {HTMLElement} */ (document.getElementById("connection"));
  const lost = state === "lost";
  const words = { live: "live", connecting: "connecting…", lost: `connection lost ${since}`, idle: "" };
  element.dataset.state = state;
  document.documentElement.classList.toggle("stale", lost);
  say(element, words[state]);
});

addEventListener("keydown", pressed);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new CustomEvent("octet-theme")));
document.getElementById("theme")?.addEventListener("click", turnTheme);
document.getElementById("help")?.addEventListener("click", openHelp);
nameTheme();
