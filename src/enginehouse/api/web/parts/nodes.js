// What can be done with a node, and what is asked before it is done.

import { part, post, put, remove, send } from "../client.js";
import { h } from "../dom.js";
import { changed, state } from "../live.js";
import { Sha256 } from "../sha256.js";
import { isEnded } from "../state.js";
import * as words from "../words.js";
import { accepted, attempt, confirm, copy, open, say } from "./layers.js";

const JOIN_SECONDS = 3600;

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

async function approveNow(nodes) {
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

/** The exact line for another machine, and a fresh token that it asks for; the node appears by itself. */
export async function addMachine() {
  const before = new Set(state.nodes.keys());
  const made = await attempt(() => post("/api/tokens", { role: "join", ttl_seconds: JOIN_SECONDS }));
  if (!made) return;
  const script = await attempt(() => send("GET", "/join.sh").then((answer) => answer.arrayBuffer()));
  if (!script) return;
  const digest = new Sha256().update(new Uint8Array(script)).hex();
  const isLocal = ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname);
  let name = "";
  let isService = false;
  open("Add a machine", (close, context) => {
    const line = words.joinLine(location.origin, name, isService);
    const arrived = [...context.state.nodes.values()].filter((node) => !before.has(node.id));
    return [
      h("p", null, "Run this on the machine. It needs Python 3.11 or newer and nothing else."),
      isLocal &&
        h(
          "p",
          { class: "note warn" },
          "This server is open at a loopback address, which other machines cannot reach. Start it with ",
          h("code", null, "enginehouse up --host 0.0.0.0"),
          " and open this page by its network address.",
        ),
      h("pre", { class: "line" }, line),
      h("div", { class: "buttons" }, h("button", { class: "main", onclick: () => copy(line) }, "Copy the command")),
      h("p", null, "It asks for this token, which is valid for one hour and for joining only."),
      h("pre", { class: "line" }, made.token),
      h("div", { class: "buttons" }, h("button", { onclick: () => copy(made.token) }, "Copy the token")),
      h(
        "label",
        { class: "field" },
        "Name of the machine (optional)",
        h("input", {
          class: "mono",
          spellcheck: "false",
          autocomplete: "off",
          oninput: (event) => {
            name = event.target.value.trim();
            changed(true);
          },
        }),
      ),
      h(
        "label",
        null,
        h("input", {
          type: "checkbox",
          checked: isService,
          onchange: (event) => {
            isService = event.target.checked;
            changed(true);
          },
        }),
        " Install a service, which starts with the machine",
      ),
      h("p", { class: "muted" }, "SHA-256 of join.sh: ", h("code", null, digest)),
      h("div", { class: "buttons" }, h("button", { onclick: close }, "Close")),
      h(
        "div",
        { role: "status" },
        arrived.length
          ? arrived.map((node) =>
              h(
                "p",
                { key: node.id, class: "note ok" },
                h("strong", null, node.name),
                ` is here: ${words.nodeMark(node)[1]}. `,
                !node.approved && h("button", { class: "main", onclick: () => approveNow([node]) }, "Approve"),
                " ",
                node.fingerprint && h("code", null, node.fingerprint),
              ),
            )
          : h("p", { class: "muted" }, "Waiting for it… it appears here by itself."),
      ),
    ];
  });
}
