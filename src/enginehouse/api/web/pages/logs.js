// Logs of engines: which there are, and one of them live. Lines are text; colours of terminals are left out.

import { get, part, readEvents, Refusal, send } from "../client.js";
import { h, memo } from "../dom.js";
import { changed } from "../live.js";
import * as words from "../words.js";
import { empty } from "../parts/marks.js";

const KEPT = 2000; // lines
const FIRST = 500;
const PAUSE_MS = 2000;
const SERVER = "~"; // in the place of a node; no node has this name

let lines = []; // {timestamp, text, stream, number}
let numbered = 0;
let status = "";
let stopping = null;
let isFollowed = true;
let search = "";

/** Whose log an address names, and where it is read: of an engine, of the worker of a node, or of a frontend. */
function sourceOf({ parts: [node, model] }) {
  if (node === SERVER) return { name: "the server that answers here", path: "/api/logs/frontend" };
  if (node && model) return { name: `${model} on ${node}`, path: `/api/nodes/${part(node)}/logs/${part(model)}` };
  if (node) return { name: `the worker on ${node}`, path: `/api/nodes/${part(node)}/worker-log` };
  return null;
}

export const title = ({ route }) => {
  const source = sourceOf(route);
  return source ? `Log of ${source.name}` : "Logs";
};

export function enter({ route }) {
  [lines, status, isFollowed, search] = [[], "", true, ""];
  const source = sourceOf(route);
  if (!source) return;
  stopping = new AbortController();
  follow(source.path, stopping.signal);
}

export function leave() {
  if (stopping) stopping.abort();
  stopping = null;
}

async function follow(path, signal) {
  while (!signal.aborted) {
    try {
      if (!lines.length) {
        for (const line of (await get(`${path}?lines=${FIRST}`, { signal })) || []) add(line);
        status = lines.length ? "" : "Nothing has been logged yet.";
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
  const { state, route, canAct } = context;
  const source = sourceOf(route);
  if (!source) return overview(state, canAct);
  const shown = search ? lines.filter((line) => line.text.toLowerCase().includes(search.toLowerCase())) : lines;
  return [
    h("p", { class: "crumbs" }, h("a", { href: "#/logs" }, "Logs")),
    h(
      "div",
      { class: "head" },
      h("h1", null, `Log of ${source.name}`),
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

function overview(state, canAct) {
  const engines = [];
  const programs = canAct ? [["The server that answers here", "", `#/logs/${SERVER}`]] : [];
  const nodes = [...state.nodes.values()].filter((node) => node.approved && !node.removedAt);
  for (const node of nodes.sort((a, b) => (a.name < b.name ? -1 : 1))) {
    const models = new Set([...(node.replicas || []), ...(node.failed_replicas || [])].map((one) => one.model_id));
    for (const model of [...models].sort())
      engines.push([model, `on ${node.name}`, `#/logs/${encodeURIComponent(node.name)}/${encodeURIComponent(model)}`]);
    if (canAct) programs.push(["Worker", `on ${node.name}`, `#/logs/${encodeURIComponent(node.name)}`]);
  }
  return [
    h("h1", null, engines.length ? "Choose whose log to see." : "No model runs, so no engine has a log."),
    engines.length > 0 && group("Engines", engines),
    programs.length > 0 && group("Programs", programs),
    !programs.length && !engines.length && empty("There is no log that may be seen here."),
  ];
}

function group(name, found) {
  return h(
    "section",
    null,
    h("h2", null, name),
    h(
      "div",
      { class: "rows" },
      found.map(([what, where, href]) =>
        h(
          "a",
          { key: href, class: "row simple", "data-row": true, href },
          h("strong", null, what),
          h("span", { class: "muted" }, where),
        ),
      ),
    ),
  );
}

const clock = (timestamp) => words.time(words.seconds(timestamp));
