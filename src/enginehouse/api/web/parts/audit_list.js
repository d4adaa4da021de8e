// The audit: who did what, when, from where, and whether it was done.

import { h } from "../dom.js";
import { changed } from "../live.js";
import { setQuery } from "../route.js";
import * as words from "../words.js";
import { age, empty, mono, table } from "./marks.js";

export function audit(list, { now, route }, _reread, more) {
  if (!list.length) return empty("Nothing was changed yet.");
  const search = (route.query.get("q") || "").toLowerCase();
  const shown = search
    ? list.filter((one) =>
        [one.who, one.action, one.summary, one.target, one.path, one.address].some((text) =>
          (text || "").toLowerCase().includes(search),
        ),
      )
    : list;
  return [
    h(
      "div",
      { class: "filters" },
      h("input", {
        type: "search",
        "data-search": true,
        "aria-label": "Search the audit",
        placeholder: "Search  ( / )",
        value: route.query.get("q") || "",
        oninput: (event) => {
          setQuery("q", event.target.value);
          changed(true);
        },
      }),
    ),
    table(
      [
        { name: "When", view: (one) => age(words.seconds(one.at), now) },
        { name: "Who", view: (one) => [one.who || one.name, " ", h("small", null, one.role)] },
        {
          name: "What",
          isWide: true,
          view: (one) => [
            one.summary || one.action,
            " ",
            one.target && h("strong", null, one.target),
            h("br"),
            h("small", null, mono(`${one.method} ${one.path}`)),
          ],
        },
        {
          name: "Outcome",
          view: (one) => [
            h("span", { class: one.status < 400 ? "ok" : "bad" }, one.status < 400 ? "done" : "refused"),
            " ",
            h("small", null, one.status, " ", one.error || ""),
            one.operation_id && [" ", h("a", { href: `#/operations/${one.operation_id}` }, "operation")],
          ],
        },
        { name: "From", view: (one) => mono(one.address || "–") },
      ],
      shown,
      { label: "Audit", key: (one) => one.id },
    ),
    more && h("div", { class: "buttons" }, h("button", { onclick: more }, "Show more")),
  ];
}
