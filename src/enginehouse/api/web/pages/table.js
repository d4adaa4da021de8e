// Every page by the first part of its address. Its modules are fetched when it is first shown, and those of all others
// when the first page is there: a browser that asks for everything at once shows the first page later.

import { h } from "../dom.js";
import { changed } from "../live.js";

const FILES = ["access", "backends", "chat", "fleet", "logs", "model", "models", "node", "operation", "operations", "settings"];
const AGAIN_MS = 2_000;
const loaded = new Map(); // by name: a page, or an error
const asked = new Set();

async function load(name) {
  if (asked.has(name)) return;
  asked.add(name);
  try {
    loaded.set(name, await import(`./${name}.js`));
  } catch (error) {
    loaded.set(name, error);
    asked.delete(name);
    setTimeout(load, AGAIN_MS, name);
  }
  changed(true);
}

/** Fetches what has not been shown yet, so that it is here also when the server is not. */
export function loadAll() {
  FILES.forEach(load);
}

/** Instead of a page whose modules are being fetched: nothing, unless they cannot be. */
const absent = (name) => ({
  title: () => "Enginehouse",
  view: () =>
    loaded.get(name) instanceof Error &&
    h("p", { class: "note bad", role: "alert" }, "This page could not be fetched from the server. It is tried again…"),
});
const absences = new Map(FILES.map((name) => [name, absent(name)]));

function page(name) {
  const found = loaded.get(name);
  if (found && !(found instanceof Error)) return found;
  load(name);
  return absences.get(name);
}

/** A page of one object, where the address names one, else the page of all. */
function either(all, one, { parts }) {
  return parts.length ? page(one) : page(all);
}

let beside = null; // both in one
const WIDE_PIXELS = 1900; // from here on the list stays beside the operation that was opened from it

function operations(route) {
  const [list, one] = [page("operations"), page("operation")];
  if (!route.parts.length) return list;
  if (window.innerWidth < WIDE_PIXELS || !list.enter || !one.enter) return one;
  return (beside ||= {
    title: one.title,
    view: (context) =>
      h(
        "div",
        { class: "besides" },
        h("aside", { "aria-label": "Operations" }, list.view(context, { isAside: true })),
        h("div", { class: "one" }, one.view(context)),
      ),
    enter: (context) => {
      if (!context.cameFrom.startsWith("operations") || !list.isKnown()) list.enter(context);
      one.enter(context);
    },
  });
}
const missing = {
  title: () => "Not found",
  view: ({ route }) =>
    h(
      "div",
      { class: "empty" },
      h("p", null, `There is no page ${route.text}.`),
      h("a", { href: "#/fleet" }, "Go to the fleet"),
    ),
};

const PAGES = {
  fleet: () => page("fleet"),
  nodes: (route) => either("fleet", "node", route),
  operations,
  backends: () => page("backends"),
  models: (route) => either("models", "model", route),
  chat: () => page("chat"),
  logs: () => page("logs"),
  access: () => page("access"),
  settings: () => page("settings"),
  login: () => page("fleet"),
};

/** The page of an address. The same object as long as the address is of the same page and its modules are here. */
export const pageOf = (route) => (PAGES[route.page] ? PAGES[route.page](route) : missing);
