// Sessions of this page: who is signed in from where, and a link for somebody else.

import { part, post, remove } from "../client.js";
import { h } from "../dom.js";
import * as words from "../words.js";
import { attempt, copy, open, say } from "./layers.js";
import { age, empty, mono, table } from "./marks.js";

export function loginLink() {
  let role = "viewer";
  let made = null;
  open("Make a login link", (close) =>
    made
      ? [
          h("p", null, `Whoever opens it first is signed in as ${role}. It works once, for ten minutes.`),
          h("pre", { class: "line" }, made.url),
          h(
            "div",
            { class: "buttons" },
            h("button", { class: "main", onclick: () => copy(made.url) }, "Copy"),
            h("button", { onclick: close }, "Close"),
          ),
        ]
      : [
          h(
            "label",
            { class: "field" },
            "Role",
            h(
              "select",
              {
                onchange: (event) => {
                  role = event.target.value;
                },
              },
              [
                ["viewer", "viewer: may look"],
                ["admin", "admin: may do everything"],
              ].map(([key, text]) => h("option", { key, value: key, selected: key === role }, text)),
            ),
          ),
          h(
            "div",
            { class: "buttons" },
            h(
              "button",
              {
                class: "main",
                onclick: () =>
                  attempt(
                    () => post("/api/session/links", { role }),
                    (answer) => {
                      made = answer;
                    },
                  ),
              },
              "Make the link",
            ),
            h("button", { onclick: close }, "Cancel"),
          ),
        ],
  );
}

export function sessions(list, { now, canAct }, reread) {
  if (!list.length) return empty("No session is open.");
  return table(
    [
      { name: "Name", view: (one) => [one.name, one.is_current && h("strong", null, " (this one)")] },
      { name: "Role", view: (one) => one.role },
      { name: "From", view: (one) => mono(one.address || "–") },
      { name: "Since", view: (one) => age(words.seconds(one.created_at), now) },
      { name: "Until", view: (one) => words.absolute(words.seconds(one.expires_at)) },
      {
        name: "",
        view: (one) =>
          canAct &&
          !one.is_current &&
          h(
            "button",
            {
              onclick: () =>
                attempt(
                  () => remove(`/api/sessions/${part(one.id)}`),
                  () => {
                    say("The session has ended.");
                    reread();
                  },
                ),
            },
            "End",
          ),
      },
    ],
    list,
    { label: "Sessions" },
  );
}
