// What can be done with a node, and what is asked before it is done.

import { part, post, put, remove } from "../client.js";
import { h } from "../dom.js";
import { isEnded } from "../state.js";
import * as words from "../words.js";
import { accepted, attempt, confirm, open, say } from "./layers.js";

export const labelText = (node) =>
  Object.entries(node.labels || {})
    .map(([key, value]) => (value ? `${key}=${value}` : key))
    .join(", ");

export function approve(node) {
  open(`Approve ${node.name}?`, (close) => [
    h(
      "p",
      null,
      "It may then run engines and gets models. Compare the fingerprint with what `enginehouse join` shows on that machine.",
    ),
    h(
      "dl",
      { class: "pairs" },
      h("dt", null, "Fingerprint"),
      h("dd", null, node.fingerprint ? h("code", null, node.fingerprint) : "none: LocalAI's workers have no key"),
      h("dt", null, "Address"),
      h("dd", null, h("code", null, node.address || "–")),
      h("dt", null, "Machine"),
      h("dd", null, [node.platform, node.gpu_vendor, words.bytes(node.total_ram)].filter(Boolean).join(" · ")),
      node.waits_for && [h("dt", null, "Why again"), h("dd", null, node.waits_for)],
    ),
    h(
      "div",
      { class: "buttons" },
      h(
        "button",
        {
          class: "main",
          onclick: () => {
            close();
            approveNow([node]);
          },
        },
        `Approve ${node.name}`,
      ),
      h("button", { onclick: close }, "Cancel"),
    ),
  ]);
}

export function approveAll(nodes) {
  open(`Approve ${words.count(nodes.length, "machine")}?`, (close) => [
    h(
      "ul",
      { class: "plain" },
      nodes.map((node) =>
        h("li", { key: node.id }, h("strong", null, node.name), " ", h("code", null, node.fingerprint || "no key")),
      ),
    ),
    h(
      "div",
      { class: "buttons" },
      h(
        "button",
        {
          class: "main",
          onclick: () => {
            close();
            approveNow(nodes);
          },
        },
        `Approve ${words.count(nodes.length, "machine")}`,
      ),
      h("button", { onclick: close }, "Cancel"),
    ),
  ]);
}

export async function approveNow(nodes) {
  const answers = await Promise.all(nodes.map((node) => attempt(() => post(`/api/nodes/${part(node.id)}/approve`))));
  const done = nodes.filter((_, at) => answers[at]).map((node) => node.name);
  if (done.length) say(`Approved ${words.names(done)}.`);
}

/** What can be done with a joined node. */
export function nodeActions(node) {
  return [
    node.drained
      ? {
          label: "Resume",
          act: () =>
            attempt(
              () => post(`/api/nodes/${part(node.id)}/resume`),
              () => say(`${node.name} gets work again.`),
            ),
        }
      : { label: "Drain…", act: () => drain(node) },
    { label: "Labels…", act: () => editLabels(node) },
    { label: "Remove…", colour: "bad", act: () => removeNode(node) },
  ];
}

function drain(node) {
  const replicas = node.replicas || [];
  confirm({
    title: `Drain ${node.name}?`,
    isDangerous: false,
    button: `Drain ${node.name}`,
    text: `It gets no new requests. Answers under way end first, then ${replicas.length ? `its ${words.count(replicas.length, "replica")} (${words.names(replicas.map((one) => one.model_id))}) ${replicas.length === 1 ? "stops" : "stop"}; what must stay up is loaded elsewhere before` : "nothing has to stop: no model runs there"}. The page says when it is safe to switch the machine off.`,
    act: () =>
      attempt(
        () => post(`/api/nodes/${part(node.id)}/drain`),
        (made) => accepted(made, `${node.name} is being drained.`),
      ),
  });
}

/** How far the drain of a node is: requests under way, replicas that still run, or that it is safe to stop. */
export function drainState(node, { state: known }) {
  if (!node.drained) return null;
  const vitals = known.vitals.get(node.id);
  const underWay = vitals ? vitals.in_flight || 0 : 0;
  const running = (node.replicas || []).length;
  const isDraining = [...known.operations.values()].some(
    (one) => one.kind === "drain" && !isEnded(one) && (one.targets || []).includes(node.id),
  );
  if (node.health === "offline") return { isSafe: true, text: "It is drained and offline." };
  if (underWay || running || isDraining) {
    return {
      isSafe: false,
      text: `Draining: ${words.count(underWay, "request")} under way, ${words.count(running, "replica")} still running. Do not switch it off yet.`,
    };
  }
  return { isSafe: true, text: "Safe to stop: nothing runs there, and nothing is sent there." };
}

export function removeNode(node) {
  const isPending = !node.approved;
  const asksForName = !isPending && node.health === "healthy";
  confirm({
    title: `Remove ${node.name}?`,
    button: `Remove ${node.name}`,
    word: asksForName ? node.name : "",
    text: isPending
      ? "Its request to join is deleted. It may ask again while its join token is valid."
      : "Its row, its credentials and what waits for it end. The engines on its disk stay. It can join again with a join token. Its name stays in the history.",
    act: () =>
      attempt(
        // Who typed the name means it.
        () => remove(`/api/nodes/${part(node.id)}${asksForName ? "?force=true" : ""}`),
        () => say(`${node.name} is removed.`),
      ),
  });
}

export function rejectNode(node) {
  confirm({
    title: `Deny ${node.name}?`,
    button: `Deny ${node.name}`,
    word: "",
    text: node.fingerprint
      ? "Its request to join is deleted, and its key is refused from now on, under every name. `enginehouse nodes reject --undo` takes that back."
      : "Its request to join is deleted. It has no key of its own, so it may ask again until its join token is revoked.",
    act: () =>
      attempt(
        () => post(`/api/nodes/${part(node.id)}/reject`),
        () => say(`${node.name} is denied.`),
      ),
  });
}

function editLabels(node) {
  let text = Object.entries(node.labels || {})
    .map(([key, value]) => `${key}=${value}`)
    .join("\n");
  open(`Labels of ${node.name}`, (close) => [
    h("p", { class: "muted" }, "One per line, as key=value. Schedules of models select nodes by them."),
    h("textarea", {
      class: "mono",
      rows: 6,
      "aria-label": "Labels",
      value: text,
      oninput: (event) => {
        text = event.target.value;
      },
    }),
    h(
      "div",
      { class: "buttons" },
      h(
        "button",
        {
          class: "main",
          onclick: () =>
            attempt(
              () => put(`/api/nodes/${part(node.id)}/labels`, labelsOf(text)),
              () => {
                close();
                say(`Labels of ${node.name} are set.`);
              },
            ),
        },
        "Set the labels",
      ),
      h("button", { onclick: close }, "Cancel"),
    ),
  ]);
}

function labelsOf(text) {
  const lines = text
    .split("\n")
    .map((line) => line.trim())
    .filter(Boolean);
  return Object.fromEntries(
    lines.map((line) => [
      line.split("=")[0].trim(),
      line.includes("=") ? line.slice(line.indexOf("=") + 1).trim() : "",
    ]),
  );
}
