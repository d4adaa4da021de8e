// The first start: what to do next, with buttons, until the first model runs.

import { post } from "../client.js";
import { h } from "../dom.js";
import { changed } from "../live.js";
import { isEnded } from "../state.js";
import { addMachine } from "./add_machine.js";
import { accepted, attempt } from "./layers.js";

let isBegun = false;
let isDismissed = false;
let isAsked = false; // a load, until the stream has told of it

async function loadTinyChat() {
  isAsked = true;
  await attempt(
    () => post("/api/models/tiny-chat/load"),
    (made) => made.jobID && accepted(made, "tiny-chat is being loaded."),
  );
  isAsked = false;
}

export function firstSteps({ state, canAct }) {
  if (!state.isListed) return null;
  const nodes = [...state.nodes.values()].filter((node) => node.approved && !node.removedAt);
  const hasNode = nodes.length > 0;
  const hasEngine = nodes.some((node) => (node.backends || []).length > 0);
  const models = [...state.models.values()];
  const hasModel = models.some((model) => (model.replicas || []).length > 0);
  const isDone = hasNode && (hasEngine || hasModel);
  // It stays to its last step for the person who began it, and is not shown where others have begun long ago.
  if (!isDone) isBegun = true;
  if (isDismissed || (isDone && !isBegun)) return null;
  const isLoading =
    isAsked ||
    models.some((model) => model.state === "loading") ||
    [...state.operations.values()].some((one) => one.kind === "load" && !isEnded(one));
  const step = (isDone, text, button) =>
    h(
      "li",
      { class: isDone ? "done" : "" },
      h("span", { class: "shape", "aria-hidden": "true" }, isDone ? "●" : "○"),
      h("span", { class: "text" }, text),
      !isDone && canAct && button,
    );
  return h(
    "section",
    { class: "first", "aria-label": "First steps" },
    h(
      "header",
      null,
      h("h2", null, "Three steps to a first answer"),
      isDone &&
        h(
          "button",
          {
            class: "quiet",
            onclick: () => {
              isDismissed = true;
              changed(true);
            },
          },
          "Hide",
        ),
    ),
    h(
      "ol",
      null,
      step(
        hasNode,
        hasNode
          ? `${nodes[0].name} has joined.`
          : "Let a machine join: this one with enginehouse up, another one with one command.",
        h("button", { onclick: () => addMachine() }, "Add a machine"),
      ),
      step(
        hasModel,
        hasModel
          ? `${models.find((model) => (model.replicas || []).length).name} is loaded.`
          : isLoading
          ? "A model is being loaded; the strip above shows how far it is."
          : "Load a model. tiny-chat is 2 MB and part of the program; its engine is installed with it (100 MB).",
        h(
          "button",
          {
            class: "main",
            disabled: !hasNode || isLoading,
            onclick: loadTinyChat,
          },
          "Load tiny-chat",
        ),
      ),
      step(false, "Ask it something.", h("a", { class: "button", href: "#/chat" }, "Open the chat")),
    ),
  );
}
