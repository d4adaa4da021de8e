// Adding a machine: the exact line for it, a fresh token, and the node as soon as it asks to join.

import { post, send } from "../client.js";
import { h } from "../dom.js";
import { changed, state } from "../live.js";
import { Sha256 } from "../sha256.js";
import * as words from "../words.js";
import { attempt, copy, open } from "./layers.js";
import { approveNow } from "./nodes.js";

const JOIN_SECONDS = 3600;

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
