// The last hour of the whole cluster, drawn. Closed on a phone, where the nodes come first.

import { plot } from "../charts.js";
import { h, memo } from "../dom.js";
import * as history from "../history.js";
import * as words from "../words.js";

const LINES = [
  ["requests_per_second", "Requests per second", words.rate],
  ["tokens_per_second", "Tokens per second", words.rate],
  ["time_to_first_token_seconds", "Time to first token", (value) => `${value.toFixed(2)} s`],
  ["queued", "Requests waiting", (value) => value.toFixed(0)],
];

export function plots() {
  const found = history.known();
  return memo("plots", [found], () =>
    h(
      "details",
      { key: "plots", class: "plots", open: window.innerWidth > 900 },
      h("summary", null, "The last hour"),
      h(
        "div",
        { class: "plot-row" },
        LINES.map(([name, title, format]) =>
          plot(title, (found && found.series[name]) || [], { format, stepSeconds: found ? found.step_seconds : 10 }),
        ),
      ),
    ),
  );
}
