// Logs of engines: which there are, and one of them live. Lines are text; colours of terminals are left out.

import { get, part, readEvents, Refusal, send } from "../client.js";
import { h, memo } from "../dom.js";
import { changed } from "../live.js";
import { empty } from "../parts/marks.js";

const KEPT = 2000; // lines
const FIRST = 500;
const PAUSE_MS = 2000;

let lines = []; // {timestamp, text, stream, number}
let numbered = 0;
let status = "";
let stopping = null;
let isFollowed = true;
let search = "";

export const title = ({ route }) => (route.parts[1] ? `Log of ${route.parts[1]}` : "Logs");

export function enter({ route }) {
  const [node, model] = route.parts;
  [lines, status, isFollowed, search] = [[], "", true, ""];
  if (!model) return;
  stopping = new AbortController();
  follow(node, model, stopping.signal);
}

export function leave() {
  if (stopping) stopping.abort();
  stopping = null;
}

async function follow(node, model, signal) {
  const path = `/api/nodes/${part(node)}/logs/${part(model)}`;
  while (!signal.aborted) {
    try {
      if (!lines.length) {
        for (const line of (await get(`${path}?lines=${FIRST}`, { signal })) || []) add(line);
        status = lines.length ? "" : "The engine has logged nothing yet.";
        changed();
      }
      // It begins with lines that are here, so that those logged between two connections are not missed.
      const answer = await send("GET", `${path}?lines=${FIRST}&follow=1`, undefined, { signal });
      const isKnown = known(lines);
      let count = 0;
      for await (const event of readEvents(answer)) {
        if (!event.data) continue;
        const line = JSON.parse(event.data);
        count += 1;
        if (count > FIRST || !isKnown(line)) add(line);
      }
      status = "The log has ended; looking again…";
    } catch (error) {
      if (signal.aborted) return;
      status = error instanceof Refusal ? error.message : "The connection was lost; looking again…";
    }
    changed();
    await new Promise((resolve) => {
      setTimeout(resolve, PAUSE_MS);
    });
  }
}

/** Whether a line is one of these, or older than they are. */
function known(here) {
  const last = here.length ? here[here.length - 1].timestamp : "";
  const texts = new Set(here.filter((line) => line.timestamp === last).map((line) => line.text));
  return (line) => line.timestamp < last || (line.timestamp === last && texts.has(line.text));
}

function add(line) {
  numbered += 1;
  lines.push({ ...line, number: numbered });
  if (lines.length > KEPT) lines.splice(0, lines.length - KEPT);
  status = "";
  changed();
}

export function view(context) {
  const { state, route } = context;
  const [node, model] = route.parts;
  if (!model) return overview(state);
  const shown = search ? lines.filter((line) => line.text.toLowerCase().includes(search.toLowerCase())) : lines;
  return [
    h("p", { class: "crumbs" }, h("a", { href: "#/logs" }, "Logs")),
    h(
      "div",
      { class: "head" },
      h("h1", null, `Log of ${model} on ${node}`),
      h(
        "div",
        { class: "buttons" },
        h(
          "label",
          null,
          h("input", {
            type: "checkbox",
            checked: isFollowed,
            onchange: (event) => {
              isFollowed = event.target.checked;
              changed(true);
            },
          }),
          " follow",
        ),
      ),
    ),
    h(
      "div",
      { class: "filters" },
      h("input", {
        type: "search",
        "data-search": true,
        "aria-label": "Search the log",
        placeholder: "Only lines with  ( / )",
        oninput: (event) => {
          search = event.target.value;
          changed(true);
        },
      }),
      h("span", { class: "muted" }, `${shown.length} lines`),
    ),
    status && h("p", { class: "muted", role: "status" }, status),
    h(
      "div",
      {
        class: "log",
        role: "log",
        "aria-label": "Log",
        tabindex: "0",
        ref: (element) => {
          if (element && isFollowed)
            requestAnimationFrame(() => {
              element.scrollTop = element.scrollHeight;
            });
        },
        onscroll: (event) => {
          const log = event.target;
          const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 24;
          if (isAtEnd !== isFollowed) {
            isFollowed = isAtEnd;
            changed();
          }
        },
      },
      shown.map((line) =>
        memo(`line ${line.number}`, [line], () =>
          h(
            "div",
            { key: line.number, class: ["logline", line.stream === "stderr" && "err"] },
            h("time", { title: line.timestamp }, clock(line.timestamp)),
            h("span", null, line.text),
          ),
        ),
      ),
      h("div", { key: "end", ref: scroll }),
    ),
  ];
}

/** The last element stays in sight while the log is followed. */
function scroll(element) {
  if (element) queueMicrotask(() => element.parentElement && keepDown(element.parentElement));
}

function keepDown(log) {
  if (log.watched) return;
  log.watched = true;
  new MutationObserver(() => {
    if (isFollowed) log.scrollTop = log.scrollHeight;
  }).observe(log, { childList: true });
}

function overview(state) {
  const found = [];
  for (const node of state.nodes.values()) {
    const models = new Set([...(node.replicas || []), ...(node.failed_replicas || [])].map((one) => one.model_id));
    for (const model of models) found.push([node.name, model]);
  }
  found.sort();
  return [
    h("h1", null, found.length ? "Choose a replica to see its log." : "No model runs, so there is no log."),
    found.length
      ? h(
          "div",
          { class: "rows" },
          found.map(([node, model]) =>
            h(
              "a",
              {
                key: `${node} ${model}`,
                class: "row simple",
                "data-row": true,
                href: `#/logs/${encodeURIComponent(node)}/${encodeURIComponent(model)}`,
              },
              h("strong", null, model),
              h("span", { class: "muted" }, `on ${node}`),
            ),
          ),
        )
      : empty(
          "Logs are those of the engines, one per replica. The log of the server itself is in the directory logs of its data.",
        ),
  ];
}

const clock = (timestamp) => (timestamp ? new Date(timestamp).toLocaleTimeString() : "");
