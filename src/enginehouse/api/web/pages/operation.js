// One operation: how it stands in a sentence, a row per node, what was asked and by whom. Open rows follow the stream.

import { nameOf } from "../attention.js";
import { get, part, post, Refusal } from "../client.js";
import { h } from "../dom.js";
import { changed, state as known } from "../live.js";
import { isEnded, putOperation } from "../state.js";
import * as words from "../words.js";
import { accepted, attempt, confirm } from "../parts/layers.js";
import { age, bar, empty, mono, pill } from "../parts/marks.js";
import { nodeRow } from "../parts/operation_rows.js";

let problem = "";
const SHOWN = 200; // rows at once
const MOMENTS = 60; // of what happened
let limit = SHOWN;

export const title = (context) => {
  const found = context.state.operations.get(context.route.parts[0]);
  return found ? words.title(found, nameOf(context.state)) : "Operation";
};

export async function enter({ route }) {
  problem = "";
  limit = SHOWN;
  try {
    // Also one that ended long ago; a summary from a list has no rows.
    const found = await get(`/api/operations/${part(route.parts[0])}`);
    putOperation(known, found, Date.now() / 1000);
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    problem = error.message;
  }
  changed(true);
}

export function view(context) {
  const { state, now, route, canAct } = context;
  const operation = state.operations.get(route.parts[0]);
  if (!operation)
    return problem
      ? empty(problem, h("a", { href: "#/operations" }, "All operations"))
      : h("p", { class: "muted" }, "Reading the operation…");
  const name = nameOf(state);
  const { totals } = operation;
  const ended = isEnded(operation);
  const rows = operation.nodes || [];
  const retryable = rows.filter((row) => ["error", "cancelled"].includes(row.status));
  return [
    h("p", { class: "crumbs" }, h("a", { href: "#/operations" }, "Operations")),
    h(
      "div",
      { class: "head" },
      h("h1", null, words.operationSentence(operation, name)),
      h(
        "div",
        { class: "buttons" },
        canAct && !ended && h("button", { onclick: () => cancelAll(operation, name) }, "Cancel"),
        canAct &&
          retryable.length > 0 &&
          ended &&
          h(
            "button",
            { class: "main", onclick: () => retry(operation, null, name) },
            `Retry on ${words.count(retryable.length, "node")}`,
          ),
        canAct &&
          ended &&
          ["failed", "partial"].includes(operation.status) &&
          !operation.dismissed &&
          h(
            "button",
            { onclick: () => attempt(() => post(`/api/operations/${part(operation.jobID)}/dismiss`)) },
            "Dismiss",
          ),
      ),
    ),
    h(
      "div",
      { class: "total" },
      pill(words.operationMark(operation)),
      bar(ended && operation.status === "succeeded" ? 100 : totals.percent, {
        label: "all nodes",
        colour: (operation.counts || {}).error ? "warn" : "",
      }),
      h("span", { class: "amount" }, words.amountOf(operation)),
      h("span", { class: "amount" }, words.rateText(operation, !ended && totals.currentBytes < totals.totalBytes)),
      h("span", { class: "left" }, ended ? "" : words.timeLeft(operation)),
    ),
    operation.error && ended && !rows.length && h("p", { class: "note bad" }, operation.error),
    operation.isParked &&
      !ended &&
      h(
        "p",
        { class: "note info" },
        "Only offline or drained nodes are left. They start when they reconnect or are resumed.",
      ),
    canary(operation, canAct),
    h(
      "div",
      { class: "noderows" },
      rows.slice(0, limit).map((row) =>
        nodeRow(row, operation, {
          canAct,
          now,
          onCancel: (one) => cancelOne(operation, one),
          onRetry: (one) => retry(operation, one, name),
        }),
      ),
      (operation.excluded || []).map((one) =>
        h(
          "article",
          { key: `excluded ${one.node_id}`, class: "noderow skipped", "data-row": true, tabindex: "0" },
          h("span", { class: "cell node" }, one.node_name),
          h("span", { class: "cell mark" }, pill(["–", "Skipped", "idle"])),
          h("span", { class: "cell left-out" }, one.reason),
        ),
      ),
    ),
    rows.length > limit &&
      h(
        "div",
        { class: "buttons" },
        h(
          "button",
          {
            onclick: () => {
              limit += 1000;
              changed(true);
            },
          },
          `Show ${words.count(rows.length - limit, "more node", "more nodes")}`,
        ),
      ),
    h(
      "div",
      { class: "columns" },
      h("section", null, h("h2", null, "What was asked"), asked(operation, now)),
      h("section", null, h("h2", null, "What happened"), happened(operation)),
    ),
  ];
}

/** What happened when, oldest first, with the seconds since it was asked. */
function happened(operation) {
  const began = words.seconds(operation.createdAt);
  const found = [[began, `Asked by ${operation.author}.`]];
  for (const row of operation.nodes || []) {
    const what = operation.kind === "load" ? `${row.node_name}: ${row.action}` : row.node_name;
    if (row.startedAt) found.push([words.seconds(row.startedAt), `${what} began${row.attempt > 1 ? ` try ${row.attempt}` : ""}.`]);
    if (row.finishedAt) found.push([words.seconds(row.finishedAt), `${what}: ${words.rowMark(row)[1].toLowerCase()}.`]);
  }
  if (operation.finishedAt) found.push([words.seconds(operation.finishedAt), `Ended: ${words.operationMark(operation)[1].toLowerCase()}.`]);
  found.sort((a, b) => a[0] - b[0]);
  const left = Math.max(0, found.length - MOMENTS);
  return [
    h(
      "ol",
      { class: "moments" },
      found.slice(left).map(([at, text], number) =>
        h(
          "li",
          { key: number },
          h("time", { title: words.absolute(at) }, at > began ? `+${words.clock(Math.floor(at - began))}` : words.time(at)),
          h("span", null, text),
        ),
      ),
    ),
    left > 0 && h("p", { class: "muted" }, `${words.count(left, "moment")} before these are not shown.`),
  ];
}

function canary(operation, canAct) {
  const found = operation.canary;
  if (!found) return null;
  const texts = {
    watching: `Begins with ${words.names((found.nodes || []).map((one) => one.node_name))}; the others follow when they have been ready for ${words.span(found.seconds)}.`,
    passed: "The first nodes have proven the new version; the others follow.",
    released: "The others were let go before the first nodes had proven the version.",
    failed: "The new version did not work on its first node and is taken back.",
    ended: "",
  };
  const text = found.message || texts[found.phase] || "";
  if (!text) return null;
  return h(
    "div",
    { class: ["note", found.phase === "failed" ? "bad" : "info"] },
    h("p", null, text),
    (found.nodes || []).map((one) =>
      h(
        "p",
        { key: one.node_id, class: "muted" },
        `${one.node_name}: ${one.state}${one.waits_for ? ` (${one.waits_for})` : ""}`,
      ),
    ),
    canAct &&
      found.phase === "watching" &&
      h(
        "button",
        { onclick: () => attempt(() => post(`/api/operations/${part(operation.jobID)}/release`)) },
        "Let the others follow now",
      ),
  );
}

function asked(operation, now) {
  const wanted = operation.asked || {};
  const rows = [
    ["By", operation.author],
    [
      "When",
      [age(words.seconds(operation.createdAt), now), ` (${words.absolute(words.seconds(operation.createdAt))})`],
    ],
    isEnded(operation) &&
      operation.finishedAt && [
        "Took",
        words.span(words.seconds(operation.finishedAt) - words.seconds(operation.createdAt)),
      ],
    wanted.nodes && ["Nodes", wanted.nodes.join(", ")],
    wanted.uri && ["From", mono(wanted.uri)],
    wanted.force && ["Forced", "yes: installed again even where it is installed"],
    wanted.max_parallel && ["At once", wanted.max_parallel],
    operation.retryOf && [
      "Retry of",
      h("a", { href: `#/operations/${operation.retryOf}` }, operation.retryOf.slice(0, 8)),
    ],
    ["Id", mono(operation.jobID)],
  ].filter(Boolean);
  return h(
    "dl",
    { class: "pairs" },
    rows.map(([term, value]) => [h("dt", null, term), h("dd", null, value)]),
  );
}

function cancelAll(operation, name) {
  const open = (operation.nodes || []).filter((row) =>
    ["queued", "downloading", "running_on_worker"].includes(row.status),
  );
  confirm({
    title: `Cancel ${words.title(operation, name)}?`,
    button: `Cancel on ${words.count(open.length || operation.totals.count, "node")}`,
    text: "Downloads stop, and what was installed before stays. Nodes that are done keep what they have.",
    act: () => attempt(() => post(`/api/operations/${part(operation.jobID)}/cancel`)),
  });
}

const cancelOne = (operation, row) =>
  attempt(() => post(`/api/operations/${part(operation.jobID)}/cancel`, { node: row.node_id }));

function retry(operation, row, name) {
  return attempt(
    () => post(`/api/operations/${part(operation.jobID)}/retry`, row ? { node: row.node_id } : {}),
    (made) => {
      accepted(made, `${words.title(operation, name)} is tried again${row ? ` on ${row.node_name}` : ""}.`);
    },
  );
}
