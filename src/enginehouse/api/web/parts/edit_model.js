// Editing a model's configuration, checked while it is typed and by the server before it is stored; and copying a model.

import { get, part, patch, post } from "../client.js";
import { h } from "../dom.js";
import { changed, list } from "../live.js";
import { attempt, open, say } from "./layers.js";

export async function editModel(name, done = () => {}) {
  const found = await attempt(() => get(`/api/models/${part(name)}`));
  if (!found) return;
  let text = JSON.stringify(found.config || {}, null, 2);
  const { replicas } = found;
  let problem = "";
  open(`Configuration of ${name}`, (close) => [
    h(
      "p",
      { class: "muted" },
      "The keys are those of LocalAI's model YAML, as JSON. Running replicas are replaced one after the other.",
    ),
    h("textarea", {
      class: ["mono", problem && "wrong"],
      rows: 16,
      spellcheck: "false",
      "aria-label": "Configuration as JSON",
      "aria-invalid": problem ? "true" : undefined,
      value: text,
      oninput: (event) => {
        text = event.target.value;
        problem = mistake(text);
        changed(true);
      },
    }),
    problem && h("p", { class: "note bad", role: "alert" }, problem),
    h(
      "div",
      { class: "buttons" },
      h(
        "button",
        {
          class: "main",
          disabled: Boolean(problem),
          onclick: () =>
            attempt(
              async () => {
                try {
                  // Only what was changed: the configuration that is stored has the files, too.
                  return await patch(`/api/models/${part(name)}`, {
                    config: difference(found.config || {}, JSON.parse(text)),
                    replicas,
                    revision: found.revision,
                  });
                } catch (error) {
                  problem = error.message;
                  throw error;
                }
              },
              (stored) => {
                close();
                say(
                  stored.revision === found.revision
                    ? `Nothing in ${name} has changed.`
                    : `${name} has a new configuration.`,
                );
                (stored.warnings || []).forEach((warning) => say(warning, { colour: "warn" }));
                done();
                list(["models"]);
              },
            ),
        },
        "Store the configuration",
      ),
      h("button", { onclick: close }, "Cancel"),
    ),
  ]);
}

/** What makes the one of the other, as RFC 7396 has it: null takes a key away. */
export function difference(before, after) {
  const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  const found = {};
  for (const key of Object.keys(before)) if (!(key in after)) found[key] = null;
  for (const [key, value] of Object.entries(after)) {
    if (isObject(before[key]) && isObject(value)) {
      const inside = difference(before[key], value);
      if (Object.keys(inside).length) found[key] = inside;
    } else if (JSON.stringify(before[key]) !== JSON.stringify(value)) {
      found[key] = value;
    }
  }
  return found;
}

/** What is wrong with a text as JSON, in a sentence; "" if nothing is. */
export function mistake(text) {
  try {
    const value = JSON.parse(text);
    return value && typeof value === "object" && !Array.isArray(value)
      ? ""
      : "The configuration must be an object: { … }.";
  } catch (error) {
    return `This is not valid JSON: ${error.message}`;
  }
}

export function copyModel(name) {
  let wanted = `${name}-copy`;
  open(`Copy ${name}`, (close) => [
    h(
      "label",
      { class: "field" },
      "Name of the copy",
      h("input", {
        class: "mono",
        value: wanted,
        oninput: (event) => {
          wanted = event.target.value;
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
          class: "main",
          disabled: !wanted.trim(),
          onclick: () =>
            attempt(
              () => post(`/api/models/${part(name)}/copy`, { name: wanted.trim() }),
              () => {
                close();
                say(`${wanted.trim()} is a copy of ${name}.`);
                list(["models"]);
              },
            ),
        },
        "Copy",
      ),
      h("button", { onclick: close }, "Cancel"),
    ),
  ]);
}
