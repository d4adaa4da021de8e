// Operations: what runs, then what has ended, with filters in the address. History beyond the live list is read in pages.

import { get } from "../client.js";
import { nameOf } from "../attention.js";
import { h } from "../dom.js";
import { changed } from "../live.js";
import { setQuery } from "../route.js";
import { isEnded, totals } from "../state.js";
import * as words from "../words.js";
import { attempt } from "../parts/layers.js";
import { empty } from "../parts/marks.js";
import { operationRow } from "../parts/operation_rows.js";

const PAGE = 100;
let older = []; // pages of the history that were asked for
let next = "";
let isRead = false;

export const title = ({ state }) => {
  const open = [...state.operations.values()].filter((one) => !isEnded(one)).length;
  return open ? `Operations (${open})` : "Operations";
};

export async function enter() {
  [older, next, isRead] = [[], "", false];
  await more();
}

async function more() {
  const before = next ? `&before=${encodeURIComponent(next)}` : "";
  await attempt(
    () => get(`/api/operations?all=true&rows=false&limit=${PAGE}${before}`),
    (answer) => {
      older = [...older, ...answer.operations.map((one) => ({ ...one, totals: totals(one) }))];
      next = answer.next || "";
      isRead = true;
    },
  );
  changed(true);
}

export function view(context) {
  const { state, route } = context;
  const live = [...state.operations.values()];
  const ids = new Set(live.map((one) => one.jobID));
  const every = [...live, ...older.filter((one) => !ids.has(one.jobID))];
  every.sort((a, b) => (a.createdAt < b.createdAt ? 1 : -1));
  const filters = {
    status: route.query.get("status") || "",
    kind: route.query.get("kind") || "",
    q: (route.query.get("q") || "").toLowerCase(),
  };
  const matching = every.filter((one) => fits(one, filters, nameOf(state)));
  const running = matching.filter((one) => !isEnded(one));
  const ended = matching.filter(isEnded);
  return [
    h(
      "div",
      { class: "head" },
      h("h1", null, live.length || state.isListed ? sentence(live) : "Reading the operations…"),
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
        ["running", "running"],
        ["succeeded", "done"],
        ["partial", "partly"],
        ["failed", "failed"],
        ["cancelled", "cancelled"],
      ]),
      choice("kind", filters.kind, [
        ["", "every kind"],
        ["install", "installs"],
        ["upgrade", "upgrades"],
        ["rollback", "rollbacks"],
        ["delete", "deletes"],
        ["load", "loads"],
        ["unload", "unloads"],
        ["drain", "drains"],
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
          ? empty("Nothing has ended that matches.")
          : h("p", { class: "muted" }, "Reading the history…"),
      next && h("div", { class: "buttons" }, h("button", { onclick: more }, `Show ${PAGE} more`)),
    ),
  ];
}

function sentence(live) {
  const open = live.filter((one) => !isEnded(one));
  const failed = live.filter((one) => ["failed", "partial"].includes(one.status) && !one.dismissed);
  const first = open.length
    ? `${words.count(open.length, "operation")} ${open.length === 1 ? "is" : "are"} running.`
    : "Nothing is running.";
  return failed.length ? `${first} ${words.count(failed.length, "operation")} did not wholly succeed.` : first;
}

function fits(one, { status, kind, q }, name) {
  const wanted = status === "running" ? ["running", "queued"] : [status];
  if (status && !wanted.includes(one.status)) return false;
  if (kind && one.kind !== kind) return false;
  return (
    !q ||
    [words.title(one, name), one.author, one.error, one.jobID, ...(one.nodes || []).map((row) => row.node_name)].some(
      (text) => (text || "").toLowerCase().includes(q),
    )
  );
}

function filter(name, value) {
  setQuery(name, value);
  changed(true);
}

function choice(name, value, options) {
  return h(
    "select",
    { "aria-label": `Filter by ${name}`, onchange: (event) => filter(name, event.target.value) },
    options.map(([key, text]) => h("option", { key, value: key, selected: key === value }, text)),
  );
}
