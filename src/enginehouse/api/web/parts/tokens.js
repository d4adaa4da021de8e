// Tokens: the list, a new one with its limits, and the end of one. A token is shown once.

import { part, post, remove } from "../client.js";
import { h } from "../dom.js";
import { changed } from "../live.js";
import * as words from "../words.js";
import { attempt, confirm, copy, open, say } from "./layers.js";
import { age, empty, table } from "./marks.js";

export function tokens(list, { now, canAct }, reread) {
  if (!list.length) return empty("There is no token.");
  return table(
    [
      { name: "Name", view: (one) => [one.name, one.expired && h("span", { class: "bad" }, " expired")] },
      { name: "Role", view: (one) => one.role },
      {
        name: "For",
        isWide: true,
        view: (one) =>
          [
            one.node && `the node ${one.node}`,
            (one.models || []).join(", "),
            one.requests_per_minute && `${one.requests_per_minute} requests a minute`,
            one.tokens_per_minute && `${one.tokens_per_minute} tokens a minute`,
          ]
            .filter(Boolean)
            .join(" · ") || "everything of its role",
      },
      { name: "Created", view: (one) => age(words.seconds(one.created_at), now) },
      {
        name: "Last used",
        view: (one) => (one.last_used_at ? age(words.seconds(one.last_used_at), now) : "never"),
      },
      { name: "Expires", view: (one) => (one.expires_at ? words.absolute(words.seconds(one.expires_at)) : "never") },
      {
        name: "",
        view: (one) =>
          canAct &&
          h(
            "div",
            { class: "buttons" },
            !one.expired &&
              h("button", { "aria-label": `Rotate ${one.name}`, onclick: () => rotate(one, reread) }, "Rotate…"),
            h("button", { "aria-label": `Revoke ${one.name}`, onclick: () => revoke(one, reread) }, "Revoke…"),
          ),
      },
    ],
    list,
    { label: "Tokens" },
  );
}

function revoke(one, reread) {
  confirm({
    title: `Revoke ${one.name}?`,
    button: `Revoke ${one.name}`,
    text: `Whoever uses this ${one.role} token is refused within a second, on every frontend. Sessions that were opened with it end.`,
    act: () =>
      attempt(
        () => remove(`/api/tokens/${part(one.id)}`),
        () => {
          say(`${one.name} is revoked.`);
          reread();
        },
      ),
  });
}

function rotate(one, reread) {
  confirm({
    title: `Rotate ${one.name}?`,
    button: `Rotate ${one.name}`,
    text: `This ${one.role} token gets a new secret, which is shown once; name, limits and usage stay. The old secret is refused within a second, on every frontend. Sessions that were opened with it end.`,
    act: () =>
      attempt(
        () => post(`/api/tokens/${part(one.id)}/rotate`),
        (made) => {
          showToken(made);
          reread();
        },
      ),
  });
}

export function createToken(reread) {
  const form = { role: "user", name: "", models: "", requests_per_minute: 0, tokens_per_minute: 0, days: 0 };
  const input = (label, name, more = {}) =>
    h(
      "label",
      { class: "field" },
      label,
      h("input", {
        value: form[name],
        oninput: (event) => {
          form[name] = event.target.value; // as typed: an empty field stays empty
        },
        ...more,
      }),
    );
  open("Create a token", (close) => [
    h(
      "label",
      { class: "field" },
      "What it is for",
      h(
        "select",
        {
          onchange: (event) => {
            form.role = event.target.value;
            changed(true);
          },
        },
        [
          ["user", "applications: may ask models (user)"],
          ["viewer", "people who look: may read everything, change nothing (viewer)"],
          ["admin", "people who operate: may do everything (admin)"],
          ["join", "machines: may ask to join (join)"],
        ].map(([role, text]) => h("option", { key: role, value: role, selected: role === form.role }, text)),
      ),
    ),
    input("Name (left out: made up)", "name", { class: "mono" }),
    form.role === "user" && [
      input("Only these models (names or patterns, separated by commas; left out: all)", "models", { class: "mono" }),
      input("Requests per minute (0: no limit)", "requests_per_minute", { type: "number", min: 0 }),
      input("Tokens per minute (0: no limit)", "tokens_per_minute", { type: "number", min: 0 }),
    ],
    input("Expires after so many days (0: never)", "days", { type: "number", min: 0 }),
    h(
      "div",
      { class: "buttons" },
      h(
        "button",
        {
          class: "main",
          onclick: () =>
            attempt(
              () => post("/api/tokens", bodyOf(form)),
              (made) => {
                close();
                showToken(made);
                reread();
              },
            ),
        },
        "Create the token",
      ),
      h("button", { onclick: close }, "Cancel"),
    ),
  ]);
}

function bodyOf(form) {
  const models = form.models
    .split(",")
    .map((one) => one.trim())
    .filter(Boolean);
  const limits =
    form.role === "user"
      ? {
          models,
          requests_per_minute: Number(form.requests_per_minute),
          tokens_per_minute: Number(form.tokens_per_minute),
        }
      : {};
  return {
    role: form.role,
    ...(form.name.trim() ? { name: form.name.trim() } : {}),
    ...limits,
    ttl_seconds: 86400 * Number(form.days),
  };
}

function showToken(made) {
  open(`The token ${made.name}`, (close) => [
    h("p", null, "It is shown this once; only its hash is stored."),
    h("pre", { class: "line" }, made.token),
    h(
      "div",
      { class: "buttons" },
      h("button", { class: "main", onclick: () => copy(made.token) }, "Copy"),
      h("button", { onclick: close }, "Close"),
    ),
  ]);
}
