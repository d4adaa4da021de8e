// What lies over a page: dialogs, the drawer of a plan, short messages. A dialog takes the focus and gives it back.

import { announce, h } from "../dom.js";
import { changed } from "../live.js";
import { PLACES } from "../keys.js";
import { Refusal } from "../client.js";
import { closeMenu, menuLayer } from "./menu.js";

const MESSAGE_MS = 8_000;
const stack = []; // open dialogs: {key, title, view, isWide, before}
let messages = [];
let nextKey = 1;

export const isOpen = () => stack.length > 0;

/** Opens a dialog; `view(close, context)` describes what is in it. */
export function open(title, view, { isDrawer = false } = {}) {
  stack.push({ key: nextKey++, title, view, isDrawer, before: document.activeElement });
  changed(true);
}

export function closeTop() {
  if (closeMenu()) return true;
  const closed = stack.pop();
  if (!closed) return false;
  changed(true);
  setTimeout(() => closed.before && closed.before.isConnected && closed.before.focus(), 0);
  return true;
}

/** Closes the menu and every dialog; the messages stay. */
export function closeAll() {
  closeMenu();
  stack.length = 0;
}

/** Closes everything: what a dialog shows is not for who comes next. */
export function clear() {
  closeAll();
  messages = [];
}

/** Says what was done, with a link to where it goes on; or what was refused, in the API's own words. */
export function say(text, { link = "", linkText = "Show", colour = "ok", detail = "" } = {}) {
  const message = { key: nextKey++, text, link, linkText, colour, detail };
  messages = [...messages.slice(-3), message];
  announce(text);
  if (colour !== "bad") setTimeout(() => dismiss(message), MESSAGE_MS);
  changed(true);
}

export function complain(error) {
  if (error.name === "AbortError") return;
  const detail = error instanceof Refusal ? [error.code, error.requestId].filter(Boolean).join(" · ") : "";
  say(error.message, { colour: "bad", detail });
}

function dismiss(message) {
  messages = messages.filter((one) => one !== message);
  changed(true);
}

/** Does what a person asked for, and says how it went. Returns the answer, or undefined if it was refused. */
export async function attempt(work, done) {
  try {
    const answer = await work();
    if (done) done(answer);
    return answer;
  } catch (error) {
    complain(error);
    return undefined;
  } finally {
    changed(true);
  }
}

/** After an operation was accepted. */
export function accepted(operation, text) {
  say(text, { link: `#/operations/${operation.jobID || operation.id}`, linkText: "Show the operation" });
}

/** Asks before something that cannot be taken back. `word` must be typed if given. */
export function confirm({ title, text, button, word = "", isDangerous = true, act }) {
  let typed = "";
  open(title, (close) => [
    h("p", null, text),
    word &&
      h(
        "label",
        { class: "field" },
        `Type ${word} to confirm`,
        h("input", {
          class: "mono",
          autocomplete: "off",
          spellcheck: "false",
          oninput: (event) => {
            typed = event.target.value;
            changed(true);
          },
        }),
      ),
    h(
      "div",
      { class: "buttons" },
      h(
        "button",
        {
          class: isDangerous ? "bad" : "main",
          disabled: Boolean(word) && typed !== word,
          onclick: () => {
            close();
            act();
          },
        },
        button,
      ),
      h("button", { onclick: close }, "Cancel"),
    ),
  ]);
}

export function openHelp() {
  open("Keys", () =>
    h(
      "dl",
      { class: "keys" },
      Object.entries(PLACES).map(([key, [, name]]) => [
        h("dt", null, h("kbd", null, "g"), " ", h("kbd", null, key)),
        h("dd", null, name),
      ]),
      [
        ["/", "search"],
        ["j", "next row"],
        ["k", "row before"],
        ["Enter", "open"],
        ["Esc", "close"],
        ["?", "this list"],
      ].map(([key, text]) => [h("dt", null, h("kbd", null, key)), h("dd", null, text)]),
    ),
  );
}

export function layers(context) {
  return [
    menuLayer(),
    stack.map((dialog) =>
      h(
        "div",
        {
          key: `dialog ${dialog.key}`,
          class: ["veil", dialog.isDrawer && "drawer"],
          onclick: (event) => {
            if (event.target === event.currentTarget) closeTop();
          },
        },
        h(
          "section",
          {
            class: "dialog",
            role: "dialog",
            "aria-modal": "true",
            "aria-label": dialog.title,
            tabindex: "-1",
            ref: takeFocus,
            onkeydown: holdFocus,
          },
          h(
            "header",
            null,
            h("h2", null, dialog.title),
            h("button", { class: "quiet close", "aria-label": "Close", onclick: closeTop }, "✕"),
          ),
          h("div", { class: "inside" }, dialog.view(closeTop, context)),
        ),
      ),
    ),
    h(
      "div",
      { key: "messages", class: "messages" },
      messages.map((message) =>
        h(
          "div",
          { key: message.key, class: ["message", message.colour], role: message.colour === "bad" ? "alert" : "status" },
          h("span", null, message.text, message.detail && h("small", null, ` ${message.detail}`)),
          message.link && h("a", { href: message.link }, message.linkText),
          message.colour === "bad" &&
            h("button", { class: "quiet", onclick: () => copy(`${message.text} ${message.detail}`) }, "Copy"),
          h("button", { class: "quiet close", "aria-label": "Dismiss", onclick: () => dismiss(message) }, "✕"),
        ),
      ),
    ),
  ];
}

function takeFocus(element) {
  if (!element) return;
  setTimeout(() => {
    const first =
      element.querySelector("input:not([type=hidden]), textarea, select") ||
      element.querySelector(".inside button, .inside a");
    (first || element).focus();
  }, 0);
}

function holdFocus(event) {
  if (event.key !== "Tab") return;
  const found = [...event.currentTarget.querySelectorAll("button, a[href], input, textarea, select")].filter(
    (one) => !one.disabled,
  );
  if (!found.length) return;
  const [first, last] = [found[0], found[found.length - 1]];
  if (event.shiftKey && document.activeElement === first) {
    last.focus();
    event.preventDefault();
  } else if (!event.shiftKey && document.activeElement === last) {
    first.focus();
    event.preventDefault();
  }
}

/** Copies text; where the browser forbids it (no HTTPS), selects it instead, so that a person can. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied.");
  } catch {
    open("Copy", () =>
      h("textarea", {
        class: "mono",
        rows: 6,
        readonly: true,
        value: text,
        ref: (element) => element && setTimeout(() => element.select(), 0),
      }),
    );
  }
}
