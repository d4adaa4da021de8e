// One node: all that is known of it, how old that is, and what waits for it.

import { figure, heardAt } from "../attention.js";
import { plot } from "../charts.js";
import { get, part } from "../client.js";
import { h } from "../dom.js";
import * as history from "../history.js";
import { changed } from "../live.js";
import { current } from "../route.js";
import { isEnded, totals } from "../state.js";
import * as words from "../words.js";
import { approve, drainState, nodeActions } from "../parts/nodes.js";
import { openPlan } from "../parts/plan.js";
import { operationRow } from "../parts/operation_rows.js";
import { age, empty, meter, mono, pill, table } from "../parts/marks.js";

const SHOWN = 20; // requests

export const title = ({ route }) => route.parts[0];
let upgrades = {}; // by the name of a backend
let before = []; // requests that ended before this page was opened

export async function enter({ route }) {
  history.want();
  before = [];
  const name = route.parts[0];
  get("/backends/upgrades").then(
    (found) => {
      upgrades = found;
      changed();
    },
    () => {},
  );
  try {
    const found = await get(`/api/operations?all=true&rows=false&limit=${SHOWN}&node=${part(name)}`);
    if (current().parts[0] === name) before = found.operations.map((one) => ({ ...one, totals: totals(one) }));
  } catch {
    return; // the stream says that the connection is lost
  }
  changed(true);
}

export const leave = () => history.unwant();

export function view(context) {
  const { state, now, route, canAct } = context;
  const name = route.parts[0];
  const node = [...state.nodes.values()].find((one) => one.name === name || one.id === name);
  if (!node)
    return state.isListed
      ? empty(`There is no node ${name}; it may have been removed.`, h("a", { href: "#/fleet" }, "Go to the fleet"))
      : h("p", { class: "muted" }, "Reading the node…");
  const heard = heardAt(state, node);
  const isAway = node.health === "offline";
  const drained = drainState(node, context);
  const about = before.map((one) => state.operations.get(one.jobID) || one);
  const listed = new Set(before.map((one) => one.jobID));
  for (const one of state.operations.values())
    if (!listed.has(one.jobID) && (one.nodes || []).some((row) => row.node_id === node.id)) about.push(one);
  about.sort((a, b) => isEnded(a) - isEnded(b) || (a.createdAt < b.createdAt ? 1 : -1));
  return [
    h(
      "div",
      { class: "head" },
      h("h1", null, node.name, " ", pill(words.nodeMark(node))),
      canAct &&
        h(
          "div",
          { class: "buttons" },
          !node.approved
            ? h("button", { class: "main", onclick: () => approve(node) }, "Approve…")
            : nodeActions(node).map((one) =>
                h("button", { key: one.label, class: one.colour, onclick: one.act }, one.label),
              ),
        ),
    ),
    h(
      "p",
      null,
      isAway
        ? ["Everything below is what it last reported, ", age(heard, now), "."]
        : ["Last heartbeat ", age(heard, now), "."],
      canAct && node.approved && [" ", h("a", { href: `#/logs/${part(node.name)}` }, "Log of its worker")],
    ),
    node.waits_for && h("p", { class: "note warn" }, node.waits_for),
    drained && h("p", { class: ["note", drained.isSafe ? "ok" : "warn"], role: "status" }, drained.text),
    h(
      "div",
      { class: ["columns", isAway && "away"] },
      h("section", null, h("h2", null, "Machine"), facts(node, context)),
      h("section", null, h("h2", null, "In use"), meters(node, state), lines(node)),
    ),
    h("section", null, h("h2", null, "Models"), replicas(node)),
    h("section", null, h("h2", null, "Backends"), backends(node, canAct)),
    h(
      "section",
      null,
      h("h2", null, "Requests"),
      about.length
        ? h(
            "div",
            { class: "rows" },
            about.slice(0, SHOWN).map((one) => operationRow(one, context)),
          )
        : empty("Nothing was requested there yet."),
      about.length >= SHOWN && h("a", { href: `#/operations?node=${part(node.name)}` }, "Show all of them"),
    ),
  ];
}

function facts(node, { state }) {
  const rows = [
    ["Fingerprint", node.fingerprint ? mono(node.fingerprint) : "none (one of LocalAI's workers)"],
    ["Version", node.worker_version ? `${node.worker_version}${node.behind ? " (behind this server)" : ""}` : "unknown"],
    ["Platform", [node.platform, node.capability].filter(Boolean).join(" · ") || "unknown"],
    [
      "Graphics",
      (node.gpu_cards || [])
        .map((card) => `${card.name || `card ${card.index}`} ${card.total_vram ? words.bytes(card.total_vram) : ""}`)
        .join(", ") ||
        node.gpu_vendor ||
        "none known",
    ],
    ["Address", mono(node.address || "–")],
    [
      "Labels",
      Object.entries(node.labels || {}).map(([key, value]) =>
        h("span", { key, class: "chip" }, value ? `${key}=${value}` : key),
      ),
    ],
    ["Confinement of engines", node.engine_confinement || "unknown"],
    [
      "Commands",
      node.degraded
        ? "do not reach it: its connection to NATS is lost"
        : node.health === "offline"
          ? "wait until it is back"
          : "reach it",
    ],
    ["Id", mono(node.id)],
  ];
  const vitals = state.vitals.get(node.id);
  if (vitals) rows.splice(7, 0, ["Requests under way", vitals.in_flight ?? "–"]);
  return h(
    "dl",
    { class: "pairs" },
    rows.map(([name, value]) => [h("dt", null, name), h("dd", null, value)]),
  );
}

function meters(node, state) {
  const free = (name) => figure(state, node, name);
  const used = (total, available) => (total && available !== null ? total - available : null);
  const one = (name, total, available) =>
    meter(name, used(total, available), total, words.bytesOf(used(total, available), total));
  return h(
    "div",
    { class: "meters tall" },
    node.total_vram ? one("VRAM", node.total_vram, free("available_vram")) : null,
    (node.gpu_cards || []).length > 1 &&
      node.gpu_cards.map((card) =>
        h(
          "div",
          { key: card.index },
          one(card.name || `card ${card.index}`, card.total_vram, card.available_vram ?? null),
        ),
      ),
    one("RAM", node.total_ram, free("available_ram")),
    meter("CPU", free("used_cores"), node.cores, `${words.rate(free("used_cores"))} of ${node.cores} cores`, {
      isBadWhenFull: false,
    }),
    one("Disk", node.total_disk, free("available_disk")),
  );
}

function lines(node) {
  const found = history.linesOf(node.id);
  if (!found) return null;
  const step = history.known().step_seconds;
  return h(
    "div",
    { class: "plot-row" },
    node.total_vram ? plot("VRAM in use", found.used_vram || [], { format: words.bytes, stepSeconds: step }) : null,
    plot("RAM in use", found.used_ram || [], { format: words.bytes, stepSeconds: step }),
    plot("Cores in use", found.used_cores || [], { format: words.rate, stepSeconds: step }),
  );
}

function replicas(node) {
  const found = node.replicas || [];
  const failed = node.failed_replicas || [];
  if (!found.length && !failed.length) return empty("No model runs there.");
  return [
    found.length > 0 &&
      table(
        [
          {
            name: "Model",
            view: (one) =>
              h(
                "a",
                { href: `#/models/${encodeURIComponent(one.model_id)}` },
                one.model_id,
                one.replica_index > 0 && ` #${one.replica_index}`,
              ),
          },
          { name: "Backend", view: (one) => one.backend || "–" },
          { name: "Memory", isNumber: true, view: (one) => words.bytes(one.memory_bytes || null) },
          { name: "Version", view: (one) => (one.outdated ? "older than what is installed" : "current") },
          {
            name: "Log",
            view: (one) =>
              h("a", { href: `#/logs/${encodeURIComponent(node.name)}/${encodeURIComponent(one.model_id)}` }, "Show"),
          },
        ],
        found,
        { label: "Models on this node", key: (one) => `${one.model_id}#${one.replica_index}` },
      ),
    failed.map((one) =>
      h(
        "p",
        { key: `${one.model_id}#${one.replica_index}`, class: "note bad" },
        `${one.model_id} does not stay up: ${one.message}`,
      ),
    ),
  ];
}

function isBehind(one, node) {
  const found = upgrades[one.name];
  return Boolean(found) && (found.nodes || []).some((each) => each.node_id === node.id && !each.unknown);
}

function backends(node, canAct) {
  const found = node.backends || [];
  if (!found.length)
    return empty("No backend is installed there.", h("a", { href: "#/backends" }, "Open the catalogue"));
  return table(
    [
      {
        name: "Name",
        view: (one) => [
          one.name,
          one.is_broken && h("span", { class: "bad" }, " (broken)"),
          one.is_meta && h("span", { class: "muted" }, ` → ${one.meta_backend_for}`),
        ],
      },
      {
        name: "Version",
        view: (one) => [
          mono(words.version(one), one.digest),
          isBehind(one, node) && h("span", { class: "warn" }, ` ↑ ${upgrades[one.name].available_version || "newer build"}`),
          canAct &&
            isBehind(one, node) && [
              " ",
              h(
                "button",
                {
                  class: "small",
                  "aria-label": `Upgrade ${one.name} here`,
                  onclick: () => openPlan({ kind: "upgrade", names: [one.name], nodes: [node.name] }),
                },
                "Upgrade…",
              ),
            ],
        ],
      },
      {
        name: "Version before",
        view: (one) => one.previous_version || (one.previous_digest || "").replace("sha256:", "").slice(0, 12) || "–",
      },
      { name: "Installed", view: (one) => (one.installed_at ? words.absolute(words.seconds(one.installed_at)) : "–") },
    ],
    found,
    { label: "Backends on this node", key: (one) => one.name },
  );
}
