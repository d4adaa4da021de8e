// Operations: what runs, then what has ended, with filters in the address. History beyond the live list is read in pages.

import { get } from "../client.js";
import { nameOf } from "../attention.js";
import { h } from "../dom.js";
import { changed } from "../live.js";
import { current, setQuery } from "../route.js";
import { isEnded, totals } from "../state.js";
import * as words from "../words.js";
import { attempt } from "../parts/layers.js";
import { empty } from "../parts/marks.js";
import { operationRow } from "../parts/operation_rows.js";

const PAGE = 100;
const FILTERS = ["status", "kind", "node"]; // which the server knows, too
let older = []; // pages of the history that were asked for
let next = "";
let isRead = false;
let turn = 0; // counts what was asked anew

export const title = ({ state }) => {
  const open = [...state.operations.values()].filter((one) => !isEnded(one)).length;
  return open ? `Operations (${open})` : "Operations";
};

export async function enter() {
  await reread();
}

export const isKnown = () => isRead;

/** Reads the history with the filters of the address. */
async function reread() {
  [older, next, isRead] = [[], "", false];
  turn += 1;
  await more();
}

async function more() {
  const asked = new URLSearchParams({ all: "true", rows: "false", limit: PAGE });
  const { query } = current();
  for (const name of FILTERS) if (query.get(name)) asked.set(name, query.get(name));
  if (next) asked.set("before", next);
  const own = turn;
  await attempt(
    () => get(`/api/operations?${asked}`),
    (answer) => {
      if (own !== turn) return; // for filters that were changed since
      older = [...older, ...answer.operations.map((one) => ({ ...one, totals: totals(one) }))];
      next = answer.next || "";
      isRead = true;
    },
  );
  changed(true);
}

/** `isAside`: beside one operation, which has the heading of the page. */
export function view(context, { isAside = false } = {}) {
  const { state, route } = context;
  const live = [...state.operations.values()];
  const filters = Object.fromEntries(FILTERS.map((name) => [name, route.query.get(name) || ""]));
  const search = (route.query.get("q") || "").toLowerCase();
  // What the server has chosen stays, also when it has ended since; what has begun since is chosen here.
  const chosen = new Set(older.map((one) => one.jobID));
  const every = [
    ...older.map((one) => state.operations.get(one.jobID) || one),
    ...live.filter((one) => !chosen.has(one.jobID) && fits(one, filters, state)),
  ];
  every.sort((a, b) => (a.createdAt < b.createdAt ? 1 : -1));
  const matching = search ? every.filter((one) => has(one, search, nameOf(state))) : every;
  const running = matching.filter((one) => !isEnded(one));
  const ended = matching.filter(isEnded);
  return [
    h(
      "div",
      { class: "head" },
      h(isAside ? "h2" : "h1", null, live.length || state.isListed ? sentence(live) : "Reading the operations…"),
    ),
    h(
      "div",
      { class: "filters" },
      h("input", {
        type: "search",
        "data-search": true,
        "aria-label": "Search operations",
        placeholder: "Search by name, node or author  ( / )",
        value: route.query.get("q") || "",
        oninput: (event) => filter("q", event.target.value),
      }),
      choice("status", filters.status, [
        ["", "every outcome"],
        ["open", "running"],
        ["succeeded", "done"],
        ["partial", "partly"],
        ["failed", "failed"],
        ["cancelled", "cancelled"],
        ["superseded", "superseded"],
      ]),
      choice("kind", filters.kind, [
        ["", "every kind"],
        ["install", "installs"],
        ["upgrade", "upgrades"],
        ["rollback", "rollbacks"],
        ["delete", "deletes"],
        ["load", "loads"],
        ["unload", "unloads"],
        ["delete_model", "deletes of models"],
        ["drain", "drains"],
      ]),
      choice("node", filters.node, [
        ["", "every node"],
        ...[...new Set([...state.nodes.values()].map((one) => one.name)), filters.node]
          .filter((name, at, all) => name && all.indexOf(name) === at)
          .sort()
          .map((name) => [name, name]),
      ]),
    ),
    running.length > 0 &&
      h(
        "section",
        null,
        h("h2", null, "Running"),
        h(
          "div",
          { class: "rows" },
          running.map((one) => operationRow(one, context)),
        ),
      ),
    h(
      "section",
      null,
      h("h2", null, "Ended"),
      ended.length
        ? h(
            "div",
            { class: "rows" },
            ended.map((one) => operationRow(one, context)),
          )
        : isRead
          ? empty(search || FILTERS.some((name) => filters[name]) ? "Nothing has ended that matches." : "Nothing has ended yet.")
          : h("p", { class: "muted" }, "Reading the history…"),
      next && h("div", { class: "buttons" }, h("button", { onclick: more }, `Show ${PAGE} more`)),
    ),
  ];
}

function sentence(live) {
  const open = live.filter((one) => !isEnded(one));
  const parked = open.filter((one) => one.isParked).length;
  const running = open.length - parked;
  const failed = live.filter((one) => ["failed", "partial"].includes(one.status) && !one.dismissed).length;
  return [
    running ? `${words.count(running, "operation")} ${running === 1 ? "is" : "are"} running.` : "Nothing is running.",
    parked && `${words.count(parked, "operation")} ${parked === 1 ? "waits" : "wait"} for nodes.`,
    failed && `${words.count(failed, "operation")} did not wholly succeed.`,
  ]
    .filter(Boolean)
    .join(" ");
}

function fits(one, { status, kind, node }, state) {
  if (status && status !== (isEnded(one) ? one.status : "open")) return false;
  if (kind && one.kind !== kind) return false;
  if (!node) return true;
  const id = ([...state.nodes.values()].find((each) => each.name === node) || {}).id;
  return (one.targets || []).includes(id) || (one.nodes || []).some((row) => row.node_name === node);
}

function has(one, search, name) {
  return [
    words.title(one, name),
    one.author,
    one.error,
    one.jobID,
    ...(one.nodes || []).map((row) => row.node_name),
  ].some((text) => (text || "").toLowerCase().includes(search));
}

function filter(name, value) {
  setQuery(name, value);
  if (FILTERS.includes(name)) reread();
  changed(true);
}

function choice(name, value, options) {
  return h(
    "select",
    { "aria-label": `Filter by ${name}`, onchange: (event) => filter(name, event.target.value) },
    options.map(([key, text]) => h("option", { key, value: key, selected: key === value }, text)),
  );
}
