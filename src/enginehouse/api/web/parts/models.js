// What can be done with a model, and how far its load is.

import { nameOf } from "../attention.js";
import { part, post, remove } from "../client.js";
import { h } from "../dom.js";
import { list, state as live } from "../live.js";
import { isEnded } from "../state.js";
import * as words from "../words.js";
import { copyModel, editModel } from "./edit_model.js";
import { accepted, attempt, confirm, open, say } from "./layers.js";
import { bar, pill } from "./marks.js";

const one = (name) => `/api/models/${part(name)}`;

/** How many replicas are wanted: by the schedule, else as many as there are. */
export function wantedOf(model, state) {
  const schedule = state.schedules && state.schedules.get(model.name);
  if (schedule && schedule.min_replicas) return schedule.min_replicas;
  return (model.replicas || []).length || (model.state === "loading" ? 1 : 0);
}

export function modelActions(model) {
  const isRunning = (model.replicas || []).length > 0;
  return [
    !isRunning && { label: "Load", act: () => load(model) },
    { label: "Scale…", act: () => scale(model) },
    isRunning && { label: "Unload…", act: () => unload(model) },
    { label: "Edit…", act: () => editModel(model.name) },
    { label: "Copy…", act: () => copyModel(model.name) },
    { label: "Delete…", colour: "bad", act: () => deleteModel(model) },
  ];
}

export const load = (model) =>
  attempt(
    () => post(`${one(model.name)}/load`),
    (made) => (made.jobID ? accepted(made, `${model.name} is being loaded.`) : say(`${model.name} is ready.`)),
  );

function unload(model) {
  const many = (model.replicas || []).length;
  confirm({
    title: `Unload ${model.name}?`,
    button: `Stop ${words.count(many, "replica")}`,
    isDangerous: false,
    text: "Its replicas stop after the answers under way, and it is no longer kept loaded. The next request for it loads it again, unless nothing may.",
    act: () =>
      attempt(
        () => post(`${one(model.name)}/unload`),
        (made) => accepted(made, `${model.name} is being unloaded.`),
      ),
  });
}

function deleteModel(model) {
  confirm({
    title: `Delete ${model.name}?`,
    button: `Delete ${model.name}`,
    word: model.name,
    text: "It is no longer served, its replicas stop, and its files are removed from every node. A file of yours outside of Enginehouse stays.",
    act: () =>
      attempt(
        () => remove(one(model.name)),
        (made) => accepted(made, `${model.name} is being deleted.`),
      ),
  });
}

/** The schedule in place: how many, where, and when idle ones stop. */
export function scale(model) {
  const known = (live.schedules && live.schedules.get(model.name)) || {};
  const form = {
    min: known.min_replicas ?? (model.replicas || []).length,
    max: known.max_replicas || 0,
    spread: Boolean(known.spread_all),
    selector: selectorText(known.node_selector),
    idle: known.idle_seconds || 0,
  };
  const field = (label, name, hint) =>
    h(
      "label",
      { class: "field" },
      label,
      h("input", {
        type: "number",
        min: 0,
        value: form[name],
        disabled: form.spread && name !== "idle",
        oninput: (event) => {
          form[name] = event.target.value; // as typed: an empty field stays empty
        },
      }),
      hint && h("small", null, hint),
    );
  open(`Replicas of ${model.name}`, (close) => [
    h(
      "p",
      { class: "muted" },
      "The fleet keeps them: elsewhere when a machine is lost, and again after every restart.",
    ),
    field("At least", "min"),
    field("At most (0: as many as requests need)", "max"),
    h(
      "label",
      null,
      h("input", {
        type: "checkbox",
        checked: form.spread,
        onchange: (event) => {
          form.spread = event.target.checked;
        },
      }),
      " one on every node that matches, instead",
    ),
    h(
      "label",
      { class: "field" },
      "Only on nodes with the labels (key=value, separated by commas)",
      h("input", {
        class: "mono",
        value: form.selector,
        oninput: (event) => {
          form.selector = event.target.value;
        },
      }),
    ),
    field("Stop when idle for so many seconds (0: never)", "idle"),
    h(
      "div",
      { class: "buttons" },
      h(
        "button",
        {
          class: "main",
          onclick: () =>
            attempt(
              () => post("/api/nodes/scheduling", bodyOf(model.name, form)),
              () => {
                close();
                say(`The schedule of ${model.name} is set.`);
                list(["schedules"]);
              },
            ),
        },
        "Set the schedule",
      ),
      known.model_name &&
        h(
          "button",
          {
            onclick: () =>
              attempt(
                () => remove(`/api/nodes/scheduling/${part(model.name)}`),
                () => {
                  close();
                  say(`${model.name} has no schedule any more.`);
                  list(["schedules"]);
                },
              ),
          },
          "Remove the schedule",
        ),
      h("button", { onclick: close }, "Cancel"),
    ),
  ]);
}

function selectorText(selector) {
  const found = typeof selector === "string" && selector ? JSON.parse(selector) : selector || {};
  return Object.entries(found)
    .map(([key, value]) => `${key}=${value}`)
    .join(", ");
}

function bodyOf(name, form) {
  const selector = Object.fromEntries(
    form.selector
      .split(",")
      .map((pair) => pair.trim())
      .filter(Boolean)
      .map((pair) => [pair.split("=")[0].trim(), pair.split("=").slice(1).join("=").trim()]),
  );
  return {
    model_name: name,
    min_replicas: form.spread ? 0 : Number(form.min),
    max_replicas: form.spread ? 0 : Number(form.max),
    spread_all: form.spread,
    node_selector: selector,
    idle_seconds: Number(form.idle),
  };
}

/** The open load of a model as a line: what it is doing, where, how far. */
export function loadProgress(model, { state }) {
  const operation = [...state.operations.values()].find(
    (each) => each.kind === "load" && each.name === model.name && !isEnded(each),
  );
  if (!operation) return null;
  const rows = (operation.nodes || []).filter((row) =>
    ["downloading", "running_on_worker", "queued"].includes(row.status),
  );
  return h(
    "a",
    { key: "load", class: "loading", href: `#/operations/${operation.jobID}` },
    rows.length
      ? rows.map((row) =>
          h(
            "span",
            { key: row.intent, class: "line" },
            pill(words.rowMark(row)),
            h("span", null, `${row.node_name}: ${row.action}`),
            bar(row.percentage || null, { label: row.action }),
            h("span", { class: "muted" }, words.bytesOf(row.current_bytes, row.total_bytes)),
          ),
        )
      : h("span", { class: "muted" }, words.operationSentence(operation, nameOf(state))),
  );
}

/** Who answers a request for the model of this name, in a sentence. */
export function answering(model, name) {
  if (!name) return "There is no model to ask yet.";
  if (!model) return `${name} is not known here.`;
  const where = [...new Set((model.replicas || []).map((one) => one.node_name))];
  if (where.length) return `${name} answers on ${words.names(where)}.`;
  return model.state === "loading" ? `${name} is being loaded.` : `${name} is loaded with your first message.`;
}
