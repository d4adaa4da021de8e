// What was used, in a table.

import { h } from "../dom.js";
import { setQuery } from "../route.js";
import * as words from "../words.js";
import { empty, table } from "./marks.js";

export function usage(answer, { route }, reread) {
  const by = route.query.get("by") || "token,model";
  const pick = (name, value, options) =>
    h(
      "select",
      {
        "aria-label": name,
        onchange: (event) => {
          setQuery(name, event.target.value);
          reread();
        },
      },
      options.map(([key, text]) => h("option", { key, value: key, selected: key === value }, text)),
    );
  const names = by.split(",");
  return [
    h(
      "div",
      { class: "filters" },
      pick("by", by, [
        ["token,model", "by token and model"],
        ["model", "by model"],
        ["node", "by node"],
        ["day", "by day"],
        ["hour", "by hour"],
        ["token", "by token"],
      ]),
      pick("days", route.query.get("days") || "", [
        ["", "seven days"],
        ["1", "one day"],
        ["30", "thirty days"],
        ["365", "a year"],
      ]),
    ),
    answer.usage.length
      ? table(
          [
            ...names.map((name) => ({
              name: name[0].toUpperCase() + name.slice(1),
              view: (one) => (name === "hour" ? words.absolute(words.seconds(one.hour)) : one[name] || "–"),
            })),
            { name: "Requests", isNumber: true, view: (one) => words.grouped(one.requests) },
            {
              name: "Errors",
              isNumber: true,
              view: (one) => h("span", { class: one.errors ? "bad" : "muted" }, words.grouped(one.errors)),
            },
            { name: "Prompt tokens", isNumber: true, view: (one) => words.grouped(one.prompt_tokens) },
            { name: "Answer tokens", isNumber: true, view: (one) => words.grouped(one.completion_tokens) },
          ],
          answer.usage,
          { label: "Usage", key: (one) => names.map((name) => one[name]).join(" ") },
        )
      : empty("Nothing was used in this time."),
    answer.truncated && h("p", { class: "muted" }, "Only the first thousand rows are shown."),
  ];
}
