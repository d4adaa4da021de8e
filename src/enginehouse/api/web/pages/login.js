// The way in: what this is, and how to get in. A login link is used once; a token can be typed instead.

import { post } from "../client.js";
import { h } from "../dom.js";
import { changed } from "../live.js";

let problem = "";
let isAsking = false;

export function failed(text) {
  problem = text;
}

/** Uses the code of a login link, and takes it out of the address and the history at once. Returns why it failed. */
export async function useCode(code) {
  history.replaceState(null, "", "#/fleet");
  return signIn({ code });
}

async function signIn(body) {
  problem = "";
  isAsking = true;
  changed(true);
  try {
    await post("/api/session", body);
    return undefined;
  } catch (error) {
    problem = error.message;
    return error;
  } finally {
    isAsking = false;
    changed(true);
  }
}

export function view({ enter }) {
  return h(
    "main",
    { class: "entry" },
    h("h1", null, "Enginehouse"),
    h(
      "p",
      { class: "lead" },
      "This server turns a set of machines into one OpenAI-compatible inference service, and keeps the engines on them installed, upgraded and running.",
    ),
    problem && h("p", { class: "note bad", role: "alert" }, problem),
    h(
      "section",
      null,
      h("h2", null, "Getting in"),
      h(
        "p",
        null,
        "On the machine of the server, run ",
        h("code", null, "enginehouse login-link"),
        " and open the link that it prints. It works once, for ten minutes. ",
        h("code", null, "enginehouse up"),
        " prints one when it starts.",
      ),
      h(
        "form",
        { onsubmit: (event) => submit(event, enter) },
        h(
          "label",
          { class: "field" },
          "Or sign in with a token of the role admin or viewer",
          h("input", {
            name: "token",
            type: "password",
            autocomplete: "current-password",
            class: "mono",
            required: true,
            placeholder: "eh-admin-…",
          }),
        ),
        h(
          "div",
          { class: "buttons" },
          h("button", { class: "main", disabled: isAsking }, isAsking ? "Signing in…" : "Sign in"),
        ),
      ),
    ),
    h(
      "section",
      null,
      h("h2", null, "For applications"),
      h(
        "p",
        null,
        "The API is at ",
        h("code", null, `${location.origin}/v1`),
        ", for any OpenAI client. ",
        h("code", null, "enginehouse keys create"),
        " makes a key; a server that listens on this machine only needs none.",
      ),
    ),
    h(
      "section",
      null,
      h("h2", null, "For another machine"),
      h(
        "p",
        null,
        "The page shows under Fleet, Add a machine, the line to run there; ",
        h("code", null, "enginehouse nodes add"),
        " prints it.",
      ),
    ),
    h(
      "p",
      { class: "muted" },
      h("a", { href: "/readyz" }, "/readyz"),
      " says whether the server is ready, or why not.",
    ),
  );
}

async function submit(event, enter) {
  event.preventDefault();
  const token = new FormData(event.target).get("token").trim();
  if (token && !(await signIn({ token }))) await enter();
}
