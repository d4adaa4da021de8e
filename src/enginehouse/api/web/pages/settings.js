// The settings of the server that answers, and what sets each of them. They are changed where they are set, not here.

import { get } from "../client.js";
import { h } from "../dom.js";
import { changed } from "../live.js";
import { setQuery } from "../route.js";
import * as words from "../words.js";
import { empty, mono, table } from "../parts/marks.js";

let found = null;
let problem = "";

export const title = () => "Settings";

export async function enter() {
  [found, problem] = [null, ""];
  try {
    found = await get("/api/settings");
  } catch (error) {
    problem = error.message;
  }
  changed(true);
}

const SOURCES = { flag: "flag", variable: "variable", file: "file", default: "default" };

export function view({ route }) {
  if (problem) return h("p", { class: "note bad" }, problem);
  if (!found) return h("p", { class: "muted" }, "Reading the settings…");
  const search = (route.query.get("q") || "").toLowerCase();
  const only = route.query.get("show") || "";
  const every = found.settings;
  const shown = every.filter(
    (one) =>
      (only !== "set" || one.source !== "default") &&
      (!search ||
        [one.name, one.help, one.flag, one.variable].some((text) => (text || "").toLowerCase().includes(search))),
  );
  const set = every.filter((one) => one.source !== "default").length;
  return [
    h(
      "h1",
      null,
      `${words.count(set, "setting")} of ${every.length} ${set === 1 ? "is" : "are"} set; the others have their defaults.`,
    ),
    h(
      "dl",
      { class: "pairs" },
      [
        ["Server", mono(found.frontend.host || found.frontend.id || "")],
        ["Version", found.frontend.version],
        ["Started", words.absolute(words.seconds(found.frontend.started_at))],
        ["Database", found.database],
        ["Data", mono(found.data)],
      ].map(([term, value]) => [h("dt", null, term), h("dd", null, value)]),
    ),
    h(
      "div",
      { class: "filters" },
      h("input", {
        type: "search",
        "data-search": true,
        "aria-label": "Search settings",
        placeholder: "Search  ( / )",
        value: route.query.get("q") || "",
        oninput: (event) => {
          setQuery("q", event.target.value);
          changed(true);
        },
      }),
      h(
        "select",
        {
          "aria-label": "Which settings",
          onchange: (event) => {
            setQuery("show", event.target.value);
            changed(true);
          },
        },
        [
          ["", "all"],
          ["set", "those that are set"],
        ].map(([key, text]) => h("option", { key, value: key, selected: key === only }, text)),
      ),
    ),
    shown.length
      ? table(
          [
            { name: "Setting", view: (one) => mono(one.name) },
            {
              name: "Value",
              isWide: true,
              view: (one) =>
                h(
                  "span",
                  { class: one.source === "default" ? "muted" : "" },
                  one.is_secret ? one.value : mono(valueText(one.value)),
                ),
            },
            {
              name: "Set by",
              view: (one) => [
                SOURCES[one.source] || one.source,
                one.source !== "default" && one.from && [" ", mono(one.from)],
              ],
            },
            {
              name: "What it does",
              isWide: true,
              view: (one) => [
                one.help,
                h("br"),
                h("small", null, [one.flag, one.variable].filter(Boolean).join(" · ")),
              ],
            },
          ],
          shown,
          { label: "Settings", key: (one) => one.name },
        )
      : empty("No setting matches."),
  ];
}

function valueText(value) {
  if (value === null || value === undefined || value === "") return "–";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
