// Backends: which node has which version (the matrix), and what the galleries offer (the catalogue, a window of a long list).

import { get, post } from "../client.js";
import { h, memo } from "../dom.js";
import { changed } from "../live.js";
import { setQuery } from "../route.js";
import * as words from "../words.js";
import { attempt, say } from "../parts/layers.js";
import { empty, mono, note } from "../parts/marks.js";
import { openInstall, openPlan } from "../parts/plan.js";
import { matrix } from "../parts/matrix.js";
import { windowed } from "../parts/windowed.js";

const ROW_PIXELS = 56;
let offers = null;
let upgrades = null;
let galleries = [];
let isChecking = false;

export const title = () => "Backends";

export async function enter() {
  const read = (path, put) =>
    get(path)
      .then(put, () => {})
      .then(() => changed(true));
  await Promise.all([
    read("/backends/available", (found) => {
      offers = found;
    }),
    read("/backends/upgrades", (found) => {
      upgrades = found;
    }),
    read("/backends/galleries", (found) => {
      galleries = found;
    }),
  ]);
}

export function view(context) {
  const { state, route, canAct } = context;
  const search = (route.query.get("q") || "").toLowerCase();
  const only = route.query.get("show") || "fits";
  const found =
    offers === null
      ? []
      : memo("offers", [offers, search, only], () => offers.filter((one) => wanted(one, search, only)));
  return [
    h(
      "div",
      { class: "head" },
      h("h1", null, sentence(state)),
      canAct &&
        h(
          "div",
          { class: "buttons" },
          h(
            "button",
            { disabled: isChecking, onclick: check },
            isChecking ? "Asking the registries…" : "Check for upgrades",
          ),
          upgradable().length > 1 &&
            h("button", { class: "main", onclick: () => upgradeAll() }, `Upgrade all ${upgradable().length}`),
        ),
    ),
    h(
      "div",
      { class: "beside" },
      h(
        "section",
        null,
        h("h2", null, "Catalogue"),
        h(
          "div",
          { class: "filters" },
          h("input", {
            type: "search",
            "data-search": true,
            "aria-label": "Search the catalogue",
            placeholder: "Search by name, tag or description  ( / )",
            value: route.query.get("q") || "",
            oninput: (event) => filter("q", event.target.value),
          }),
          h(
            "select",
            { "aria-label": "Which entries", onchange: (event) => filter("show", event.target.value) },
            [
              ["fits", "that some node can run"],
              ["installed", "installed"],
              ["all", "all, also builds and development"],
            ].map(([key, text]) => h("option", { key, value: key, selected: key === only }, text)),
          ),
        ),
        galleries
          .filter((one) => one.error)
          .map((one) =>
            h("div", { key: one.name }, note(`The gallery ${one.name} could not be read: ${one.error}`, "warn")),
          ),
        offers === null
          ? h("p", { class: "muted" }, "Reading the catalogue…")
          : found.length
            ? [
                h("p", { class: "muted" }, words.count(found.length, "entry", "entries")),
                windowed("catalogue", found, ROW_PIXELS, (one) => offer(one, canAct)),
              ]
            : empty(search ? `No entry matches “${search}”.` : "The galleries offer nothing for these machines."),
      ),
      h("section", null, h("h2", null, "Installed"), matrix(context, upgrades || {}, { onPlan: openPlan })),
    ),
  ];
}

const upgradable = () =>
  Object.values(upgrades || {}).filter((one) => (one.nodes || []).some((node) => node.unknown !== true));

function sentence(state) {
  const holders = new Map();
  const approved = [...state.nodes.values()].filter((node) => node.approved && !node.removedAt);
  for (const node of approved)
    for (const one of node.backends || []) if (!one.is_meta) holders.set(one.name, (holders.get(one.name) || 0) + 1);
  const many = upgradable().length;
  if (!holders.size) return "No backend is installed yet. Choose one from the catalogue.";
  return `${words.count(holders.size, "backend")} ${holders.size === 1 ? "is" : "are"} installed on ${words.count(approved.filter((node) => (node.backends || []).length).length, "node")}. ${many ? `${words.count(many, "upgrade")} ${many === 1 ? "is" : "are"} available.` : "No upgrade is known."}`;
}

function wanted(one, search, only) {
  if (only === "fits" && (!one.fits || one.is_variant || one.is_development)) return false;
  if (only === "installed" && !one.installed) return false;
  return (
    !search ||
    [one.name, one.alias, one.description, ...(one.tags || [])].some((text) =>
      (text || "").toLowerCase().includes(search),
    )
  );
}

function filter(name, value) {
  setQuery(name, value);
  changed(true);
}

function offer(one, canAct) {
  return h(
    "div",
    {
      class: "offer",
      "data-row": true,
      tabindex: "0",
      onkeydown: (event) => {
        if (event.key === "Enter" && event.target === event.currentTarget) openInstall(one);
      },
    },
    h(
      "div",
      { class: "text" },
      h(
        "div",
        null,
        h("strong", null, one.name),
        " ",
        one.version && mono(one.version),
        " ",
        h(
          "small",
          null,
          one.gallery.name,
          one.is_development && " · development",
          one.is_variant && " · build for one kind of hardware",
        ),
      ),
      h(
        "div",
        { class: "muted cut", title: one.description || undefined },
        one.description || (one.tags || []).join(", ") || one.uri,
      ),
    ),
    one.installed && h("span", { class: "chip" }, "installed"),
    canAct
      ? h("button", { "aria-label": `Plan the install of ${one.name}`, onclick: () => openInstall(one) }, "Plan…")
      : h("button", { onclick: () => openInstall(one) }, "Which build?"),
  );
}

async function check() {
  isChecking = true;
  changed(true);
  await attempt(
    () => post("/backends/upgrades/check"),
    (found) => {
      upgrades = found;
      const many = upgradable().length;
      say(many ? `${words.count(many, "upgrade")} found.` : "Everything is at its newest version.");
    },
  );
  isChecking = false;
  changed(true);
}

function upgradeAll() {
  const names = upgradable().map((one) => one.backend_name);
  openPlan({ kind: "upgrade", names });
}
