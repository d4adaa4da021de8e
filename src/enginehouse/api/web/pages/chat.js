// A playground: one conversation with one model, streamed. It says which node answered and how fast, and why it waits.

import { get, part } from "../client.js";
import { ask, conversation, forget, requestCode, stop } from "../conversation.js";
import { h, memo } from "../dom.js";
import { changed } from "../live.js";
import { markdown } from "../markdown.js";
import { setQuery } from "../route.js";
import * as words from "../words.js";
import { attempt, complain, copy, open } from "../parts/layers.js";
import { empty } from "../parts/marks.js";
import { answering, loadProgress } from "../parts/models.js";

const LARGEST_FILE = 20 * 1024 * 1024;
const LONGEST_MARKDOWN = 60_000; // characters; what is longer is shown as it is, or the page would stand still
let draft = "";
let files = []; // {name, kind, url}
let takes = { model: "", images: false, audio: false };

export const title = () => "Chat";

export function enter() {
  takes = { model: "", images: false, audio: false }; // its configuration may have changed since
}

export function view(context) {
  const { messages, running } = conversation;
  const { state, route, canAct } = context;
  if (!canAct) return empty("This session is read-only; only a person with the role admin may ask a model here.");
  const models = [...state.models.values()]
    .filter((one) => !one.removedAt)
    .sort((a, b) => (a.state === "loaded" ? 0 : 1) - (b.state === "loaded" ? 0 : 1) || (a.name < b.name ? -1 : 1));
  const chosen = route.query.get("model") || (models[0] || {}).name || "";
  const model = state.models.get(chosen);
  look(chosen);
  return h(
    "div",
    { class: "chat" },
    h("h1", null, answering(model, chosen)),
    h(
      "div",
      { class: "head" },
      h(
        "label",
        null,
        "Model ",
        h(
          "select",
          {
            onchange: (event) => {
              setQuery("model", event.target.value);
              changed(true);
            },
          },
          models.map((one) =>
            h(
              "option",
              { key: one.name, value: one.name, selected: one.name === chosen },
              `${one.name}${one.state === "loaded" ? "" : ` (${words.modelMark(one)[1]})`}`,
            ),
          ),
        ),
      ),
      h(
        "div",
        { class: "buttons" },
        h("button", { onclick: () => showCode(chosen) }, "As curl or Python"),
        h(
          "button",
          {
            disabled: !messages.length || Boolean(running),
            onclick: forget,
          },
          "New conversation",
        ),
      ),
    ),
    h(
      "details",
      { class: "system" },
      h("summary", { class: "muted" }, "System prompt"),
      h("textarea", {
        rows: 2,
        "aria-label": "System prompt",
        value: conversation.system,
        placeholder: (model && model.options && model.options.system_prompt) || "",
        oninput: (event) => {
          conversation.system = event.target.value;
        },
      }),
    ),
    h(
      "div",
      { class: "talk", role: "log", "aria-label": "Conversation" },
      messages.length
        ? messages.map((one, at) =>
            // What was said before does not change, and is not read again for every token of an answer.
            one === (running && running.answer)
              ? shown(one, at)
              : memo(`said ${at}`, [one, running], () => shown(one, at)),
          )
        : h("p", { class: "muted" }, chosen ? `Ask ${chosen} something.` : "No model is known yet."),
    ),
    running && !messages[messages.length - 1].content && waiting(model, context),
    h(
      "form",
      {
        class: "ask",
        onsubmit: (event) => {
          event.preventDefault();
          sendDraft(chosen);
        },
      },
      files.length > 0 &&
        h(
          "div",
          { class: "files" },
          files.map((file, at) =>
            h(
              "span",
              { key: at, class: "chip" },
              file.name,
              h(
                "button",
                {
                  type: "button",
                  class: "quiet",
                  "aria-label": `Remove ${file.name}`,
                  onclick: () => {
                    files = files.filter((one) => one !== file);
                    changed(true);
                  },
                },
                "✕",
              ),
            ),
          ),
        ),
      h("textarea", {
        rows: 3,
        "aria-label": "Your message",
        placeholder: "Your message (Enter sends, Shift+Enter is a new line)",
        value: draft,
        oninput: (event) => {
          draft = event.target.value;
        },
        onkeydown: (event) => {
          if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
            event.preventDefault();
            sendDraft(chosen);
          }
        },
      }),
      h(
        "div",
        { class: "buttons" },
        running
          ? h("button", { type: "button", onclick: stop }, "Stop")
          : h("button", { class: "main", disabled: !chosen }, "Send"),
        (takes.images || takes.audio) &&
          h(
            "label",
            { class: "button" },
            takes.images ? (takes.audio ? "Add a picture or a sound" : "Add a picture") : "Add a sound",
            h("input", {
              type: "file",
              class: "unseen",
              accept: [takes.images && "image/*", takes.audio && "audio/*"].filter(Boolean).join(","),
              onchange: attach,
            }),
          ),
      ),
    ),
  );
}

/** What a model takes, by its configuration; asked once per model. */
function look(model) {
  if (!model || takes.model === model) return;
  takes = { model, images: false, audio: false };
  get(`/api/models/${part(model)}`).then(
    (found) => {
      const config = found.config || {};
      const uses = JSON.stringify([
        config.known_usecases || [],
        config.pipeline || {},
        config.options || [],
      ]).toLowerCase();
      takes = {
        model,
        images: Boolean(config.mmproj) || uses.includes("vision") || uses.includes("mmproj"),
        audio: uses.includes("transcript") || uses.includes("audio"),
      };
      changed();
    },
    () => {},
  );
}

function waiting(model, context) {
  const progress = model && loadProgress(model, context);
  const seconds = (performance.now() - conversation.running.began) / 1000;
  return h(
    "div",
    { class: "waiting-for", role: "status" },
    progress ||
      h(
        "p",
        { class: "muted" },
        model && model.state === "loaded"
          ? `Waiting for the first token… ${seconds.toFixed(0)} s`
          : "The model is being loaded…",
      ),
  );
}

function shown(message, at) {
  const isMine = message.role === "user";
  const figures = [
    message.node && `on ${message.node}`,
    message.firstToken !== undefined && `first token after ${message.firstToken.toFixed(2)} s`,
    message.perSecond && `${words.rate(message.perSecond)} tokens/s`,
    message.tokens && words.count(message.tokens, "token"),
    message.ended,
  ].filter(Boolean);
  return h(
    "article",
    { key: at, class: ["said", isMine ? "mine" : "theirs"] },
    h("header", { class: "muted" }, isMine ? "You" : message.model),
    (message.files || []).map((file, number) =>
      file.kind === "image"
        ? h("img", { key: number, src: file.url, alt: file.name })
        : h("span", { key: number, class: "chip" }, file.name),
    ),
    message.reasoning &&
      h(
        "details",
        { class: "reasoning" },
        h("summary", { class: "muted" }, "Reasoning"),
        h("div", null, message.reasoning),
      ),
    isMine ? h("p", { class: "plain-text" }, message.content) : content(message),
    message.error && h("p", { class: "note bad", role: "alert" }, message.error),
    figures.length > 0 && h("p", { class: "figures muted" }, figures.join(" · ")),
    !isMine && message.content && h("button", { class: "quiet", onclick: () => copy(message.content) }, "Copy"),
  );
}

function content({ content: text }) {
  return text.length > LONGEST_MARKDOWN
    ? h("p", { class: "plain-text" }, text)
    : h("div", { class: "markdown" }, markdown(text));
}

function sendDraft(model) {
  const text = draft.trim();
  if (conversation.running || !model || (!text && !files.length)) return;
  ask(model, text, files);
  [draft, files] = ["", []];
}

async function attach(event) {
  const [file] = event.target.files;
  event.target.value = "";
  if (!file) return;
  if (file.size > LARGEST_FILE) {
    complain(new Error(`${file.name} is larger than 20 MiB.`));
    return;
  }
  await attempt(async () => {
    const url = await new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(new Error(`${file.name} could not be read.`));
      reader.readAsDataURL(file);
    });
    files = [...files, { name: file.name, kind: file.type.startsWith("image/") ? "image" : "audio", url }];
  });
}

function showCode(model) {
  const { curl, python } = requestCode(model, draft.trim(), location.origin);
  open("The same request", () =>
    [
      ["curl", curl],
      ["Python", python],
    ].map(([name, code]) => [
      h("h3", null, name),
      h("pre", { class: "line" }, code),
      h("div", { class: "buttons" }, h("button", { onclick: () => copy(code) }, `Copy for ${name}`)),
    ]),
  );
}
