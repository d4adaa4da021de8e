// Small parts that every page uses: a mark with its word, a bar, an age, a table that becomes cards on a phone.

import { spark } from "../charts.js";
import { h } from "../dom.js";
import * as words from "../words.js";

export function pill([shape, word, colour], tip = "") {
  return h(
    "span",
    { class: ["pill", colour], title: tip || undefined },
    h("span", { class: "shape", "aria-hidden": "true" }, shape),
    word,
  );
}

/** A bar from 0 to 100. `label` is read out; an unknown share is drawn as unknown. */
export function bar(percent, { label = "", colour = "", text = "" } = {}) {
  const isKnown = percent !== null && percent !== undefined && isFinite(percent);
  const width = isKnown ? Math.min(100, Math.max(0, percent)) : 0;
  return h(
    "span",
    {
      class: ["bar", colour, !isKnown && "unknown"],
      role: "progressbar",
      "aria-label": label || "progress",
      "aria-valuemin": "0",
      "aria-valuemax": "100",
      "aria-valuenow": isKnown ? Math.round(width) : undefined,
      "aria-valuetext": text || undefined,
    },
    h("span", { class: "fill", style: { width: `${width}%` } }),
  );
}

/** A share of something that a machine has. */
export function meter(name, used, total, shown, { line = null, isBadWhenFull = true } = {}) {
  const isKnown = used !== null && used !== undefined && total;
  const share = isKnown ? (100 * used) / total : null;
  const colour = !isBadWhenFull ? "" : share > 95 ? "bad" : share > 85 ? "warn" : "";
  return h(
    "div",
    { class: "meter", title: isKnown ? `${name}: ${shown}` : `${name}: unknown` },
    h("span", { class: "name" }, name),
    h(
      "span",
      { class: "track" },
      line && spark(line, { label: `${name} in the last hour`, top: total, width: 120, height: 10 }),
      bar(share, { label: `${name} in use`, colour, text: shown }),
    ),
    h("span", { class: "amount" }, isKnown ? shown : "–"),
  );
}

export function age(at, now) {
  return h(
    "time",
    { title: words.absolute(at), datetime: at ? new Date(at * 1000).toISOString() : undefined },
    words.ago(at, now),
  );
}

export function mono(text, title) {
  return h("code", { title: title || undefined }, text);
}

/** A table: `columns` are `{name, view, isWide?, isNumber?}`. On a phone each row is a card with the same words. */
export function table(columns, rows, { label, onOpen, key = (row) => row.id, rowClass } = {}) {
  return h(
    "div",
    { class: "scroller", tabindex: "-1" },
    h(
      "table",
      { "aria-label": label },
      h(
        "thead",
        null,
        h(
          "tr",
          null,
          columns.map((column) =>
            h("th", { scope: "col", class: column.isNumber ? "number" : undefined }, column.name),
          ),
        ),
      ),
      h(
        "tbody",
        null,
        rows.map((row) =>
          h(
            "tr",
            {
              key: key(row),
              class: rowClass ? rowClass(row) : undefined,
              "data-row": true,
              tabindex: onOpen ? "0" : undefined,
              onkeydown: onOpen
                ? (event) => {
                    if (event.key === "Enter" && event.target === event.currentTarget) onOpen(row);
                  }
                : undefined,
              onclick: onOpen
                ? (event) => {
                    if (!event.target.closest("a, button, input, select, label")) onOpen(row);
                  }
                : undefined,
            },
            columns.map((column) =>
              h(
                "td",
                { "data-name": column.name, class: [column.isNumber && "number", column.isWide && "wide"] },
                column.view(row),
              ),
            ),
          ),
        ),
      ),
    ),
  );
}

export function empty(text, ...more) {
  return h("div", { class: "empty" }, h("p", null, text), more);
}

export function note(text, colour = "info") {
  return h("p", { class: ["note", colour] }, text);
}
