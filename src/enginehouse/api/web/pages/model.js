// One model: how it stands, why it is not loading, where it runs, its configuration.

import { get, part, Refusal } from "../client.js";
import { plot, squares } from "../charts.js";
import { h } from "../dom.js";
import * as history from "../history.js";
import { changed } from "../live.js";
import * as words from "../words.js";
import { editModel } from "../parts/edit_model.js";
import { empty, mono, note, pill, table } from "../parts/marks.js";
import { load, loadProgress, modelActions, wantedOf } from "../parts/models.js";

let defined = null;
let explanation = null;
let replicas = [];
let readAt = 0; // the moment of that list, whose ages grow with time
let problem = "";
let readFor = ""; // the version of the live state that the answers belong to

export const title = ({ route }) => route.parts[0];

export async function enter(context) {
  [defined, explanation, replicas, problem, readFor] = [null, null, [], "", ""];
  history.want();
  await read(context.route.parts[0]);
}

export const leave = () => history.unwant();

async function read(name) {
  // Without its definition there is no page; the rest may be missing.
  const shown = get(`/api/models/${part(name)}`).then(
    (found) => {
      defined = found;
      problem = "";
    },
    (error) => {
      if (error instanceof Refusal) problem = error.message;
    },
  );
  const more = (path, put) => get(path).then(put, () => {});
  await Promise.all([
    shown,
    more(`/api/models/${part(name)}/explain`, (found) => {
      explanation = found;
    }),
    more("/api/replicas", (found) => {
      replicas = found.filter((one) => one.model === name);
      readAt = Date.now() / 1000;
    }),
  ]);
  changed(true);
}

export function view(context) {
  const { state, route, canAct } = context;
  const name = route.parts[0];
  const model = state.models.get(name);
  refreshAfterChanges(name, model, state);
  if (!defined)
    return problem
      ? empty(problem, h("a", { href: "#/models" }, "All models"))
      : h("p", { class: "muted" }, "Reading the model…");
  const shown = model || { name, state: "added", replicas: [] };
  return [
    h("p", { class: "crumbs" }, h("a", { href: "#/models" }, "Models")),
    h(
      "div",
      { class: "head" },
      h("h1", null, name, " ", pill(words.modelMark(shown))),
      canAct &&
        h(
          "div",
          { class: "buttons" },
          shown.state === "loaded" &&
            h("a", { class: "button", href: `#/chat?model=${encodeURIComponent(name)}` }, "Chat"),
          shown.state !== "loaded" &&
            shown.state !== "loading" &&
            h("button", { class: "main", onclick: () => load(shown) }, "Load"),
          modelActions(shown)
            .filter((one) => one && one.label !== "Load")
            .map((one) => h("button", { key: one.label, class: one.colour, onclick: one.act }, one.label)),
        ),
    ),
    h("p", null, sentence(shown, state)),
    loadProgress(shown, context),
    (defined.warnings || []).map((text) => h("div", { key: text }, note(text, "warn"))),
    explanation && explained(explanation, shown, state),
    h(
      "div",
      { class: "columns" },
      h("section", null, h("h2", null, "Replicas"), running(replicas)),
      h("section", null, h("h2", null, "Definition"), facts(defined, state)),
    ),
    lines(name),
    h(
      "section",
      null,
      h("h2", null, "Configuration"),
      Object.keys(defined.config || {}).length
        ? h("pre", { class: "line" }, JSON.stringify(defined.config, null, 2))
        : h("p", { class: "muted" }, "Everything is left to the engine and the worker."),
      canAct &&
        h(
          "div",
          { class: "buttons" },
          h("button", { onclick: () => editModel(name, () => read(name)) }, "Edit…"),
          h(
            "a",
            { class: "button", href: `/api/models/${part(name)}/export`, download: `${name}.yaml` },
            "Export as YAML",
          ),
        ),
    ),
  ];
}

function refreshAfterChanges(name, model, state) {
  const stamp = `${model ? model.state : ""} ${model ? (model.replicas || []).length : 0} ${state.nodes.size} ${[...state.nodes.values()].filter((node) => node.health === "healthy").length}`;
  if (readFor && stamp !== readFor) read(name);
  readFor = stamp;
}

function sentence(model, state) {
  const wanted = wantedOf(model, state);
  const found = (model.replicas || []).length;
  const where = [...new Set((model.replicas || []).map((one) => one.node_name))];
  if (!found)
    return wanted
      ? `${words.count(wanted, "replica")} ${wanted === 1 ? "is" : "are"} wanted, and none is there.`
      : "It is loaded when the first request asks for it.";
  return `${words.count(found, "replica")} on ${words.names(where)}; ${wanted === found ? "as many as wanted." : `${wanted} wanted.`}`;
}

function explained(found, model, state) {
  const wanted = wantedOf(model, state);
  const isShort = (model.replicas || []).length < Math.max(wanted, found.wanted);
  const memory = found.needs_bytes
    ? `A replica needs ${words.bytes(found.needs_bytes)} (${found.needs_from}).`
    : "What a replica needs is not known.";
  return h(
    "section",
    null,
    h("h2", null, isShort || model.state === "added" ? "Why is it not loading?" : "Where would another replica go?"),
    h(
      "p",
      null,
      memory,
      " ",
      found.chosen
        ? [
            `The next one would go to ${found.chosen}`,
            found.stops.length ? `, after ${words.names([...found.stops])} stopped there.` : ".",
          ]
        : "No node can take another one now.",
    ),
    found.last_failure &&
      h(
        "p",
        { class: "note bad" },
        `The last load failed: ${found.last_failure.replace(/\.$/, "")}.`,
        found.retry_in_seconds !== null &&
          found.retry_in_seconds !== undefined &&
          ` Next try in ${words.span(found.retry_in_seconds)}.`,
      ),
    h(
      "ul",
      { class: "plain verdicts" },
      found.nodes.map((one) =>
        h(
          "li",
          { key: one.node_id },
          h("span", { class: one.fits ? "ok" : "idle", "aria-hidden": "true" }, one.fits ? "● " : "– "),
          h("strong", null, one.node_name),
          " ",
          h("span", { class: "muted" }, one.fits ? "has room for it" : one.reason),
        ),
      ),
    ),
    found.would_help?.length > 0 &&
      h("section", null, [
        h("h2", { key: "title" }, "What would help"),
        h(
          "ul",
          { key: "list", class: "plain verdicts" },
          found.would_help.map((one) => h("li", { key: one }, one)),
        ),
      ]),
  );
}

function running(found) {
  if (!found.length) return empty("None.");
  return table(
    [
      {
        name: "Node",
        view: (one) =>
          h(
            "a",
            { href: `#/nodes/${encodeURIComponent(one.node_name)}` },
            one.node_name,
            one.slot > 0 && ` #${one.slot}`,
          ),
      },
      {
        name: "State",
        view: (one) => [one.state, one.outdated && h("small", null, ` to be replaced: ${one.outdated}`)],
      },
      { name: "Since", view: (one) => words.span(one.age_seconds + Date.now() / 1000 - readAt) },
      { name: "Under way", isNumber: true, view: (one) => one.in_flight },
      { name: "Memory", isNumber: true, view: (one) => words.bytes(one.memory_bytes) },
      {
        name: "Log",
        view: (one) =>
          h("a", { href: `#/logs/${encodeURIComponent(one.node_name)}/${encodeURIComponent(one.model)}` }, "Show"),
      },
    ],
    found,
    { label: "Replicas", key: (one) => `${one.node_id}#${one.slot}` },
  );
}

function facts(model, state) {
  const schedule = state.schedules && state.schedules.get(model.name);
  const rows = [
    ["Backend", h("a", { href: `#/backends?q=${encodeURIComponent(model.backend)}&show=all` }, model.backend)],
    [
      "Wanted",
      schedule
        ? [
            squares((model.running || []).length, schedule.min_replicas),
            ` at least ${schedule.min_replicas || 0}${schedule.max_replicas ? `, at most ${schedule.max_replicas}` : ""}${schedule.spread_all ? "one on every matching node" : ""}`,
          ]
        : "no schedule",
    ],
    ["Licence", model.license || "unknown"],
    ["Size", words.bytes(model.size_bytes || null)],
    ["Revision", mono(model.revision)],
    model.endpoint && ["Served by", mono(model.endpoint)],
    [
      "Files",
      model.files.length
        ? h(
            "ul",
            { class: "plain" },
            model.files.map((file) =>
              h(
                "li",
                { key: file.name },
                file.name,
                " ",
                h("small", null, words.bytes(file.size_bytes || null)),
                h("br"),
                h("small", null, mono(file.uri)),
              ),
            ),
          )
        : "none",
    ],
    model.description && ["Description", model.description],
  ].filter(Boolean);
  return h(
    "dl",
    { class: "pairs" },
    rows.map(([term, value]) => [h("dt", null, term), h("dd", null, value)]),
  );
}

function lines(name) {
  const found = history.known();
  const own = found && found.models && found.models[name];
  if (!own) return null;
  return h(
    "div",
    { class: "plot-row" },
    plot("Requests per second", own.requests_per_second || [], { format: words.rate, stepSeconds: found.step_seconds }),
    plot("Time to first token", own.time_to_first_token_seconds || [], {
      format: (value) => `${value.toFixed(2)} s`,
      stepSeconds: found.step_seconds,
    }),
  );
}
