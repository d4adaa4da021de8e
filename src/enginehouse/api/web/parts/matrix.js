// Backends by nodes: a cell has the version and what is notable of it, and a menu with what can be done there.

import { h, memo } from "../dom.js";
import * as words from "../words.js";
import { confirm, attempt, accepted } from "./layers.js";
import { post } from "../client.js";
import { empty } from "./marks.js";
import { menuButton } from "./menu.js";

const WIDEST = 12; // nodes as columns; more are summed up per version

export function matrix(context, upgrades, { onPlan }) {
  const { state, canAct } = context;
  const nodes = [...state.nodes.values()].filter(
    (node) => node.approved && !node.removedAt && (node.backends || []).length,
  );
  nodes.sort((a, b) => (a.name < b.name ? -1 : 1));
  return memo("matrix", [state.nodes.size, upgrades, canAct, ...nodes], () => {
    const rows = backendsOf(nodes);
    if (!rows.size) return empty("No backend is installed.");
    const names = [...rows.keys()].sort();
    const usual = words.usualVersions(nodes);
    const isWide = nodes.length > WIDEST;
    return h(
      "div",
      { key: "matrix", class: "scroller", tabindex: "0" },
      h(
        "table",
        { class: "matrix", "aria-label": "Backends by node" },
        h(
          "thead",
          null,
          h(
            "tr",
            null,
            h("th", { scope: "col" }, "Backend"),
            isWide
              ? h("th", { scope: "col" }, "Versions")
              : nodes.map((node) =>
                  h(
                    "th",
                    { key: node.id, scope: "col" },
                    h("a", { href: `#/nodes/${encodeURIComponent(node.name)}` }, node.name),
                    node.health === "offline" && h("small", null, " offline"),
                  ),
                ),
          ),
        ),
        h(
          "tbody",
          null,
          names.map((name) =>
            h(
              "tr",
              { key: name },
              h(
                "th",
                { scope: "row" },
                name,
                " ",
                canAct && menu(name, rows.get(name), upgrades[name], onPlan),
                upgrades[name] && h("div", { class: "warn" }, `↑ ${upgrades[name].available_version || "newer build"}`),
              ),
              isWide
                ? h("td", { "data-name": "Versions" }, summed(rows.get(name), upgrades[name]))
                : nodes.map((node) =>
                    h(
                      "td",
                      { key: node.id, "data-name": node.name },
                      cell(rows.get(name).get(node.id), node, upgrades[name], usual.get(name), canAct, onPlan),
                    ),
                  ),
            ),
          ),
        ),
      ),
    );
  });
}

function backendsOf(nodes) {
  const rows = new Map();
  for (const node of nodes) {
    for (const one of node.backends || []) {
      if (one.is_meta) continue;
      if (!rows.has(one.name)) rows.set(one.name, new Map());
      rows.get(one.name).set(node.id, one);
    }
  }
  return rows;
}

function marks(one, node, upgrade, usual) {
  const found = [];
  if (one.is_broken) found.push(["✕ broken", "bad"]);
  const behind = upgrade && (upgrade.nodes || []).find((entry) => entry.node_id === node.id);
  if (behind) found.push(behind.unknown ? ["? version unknown", "idle"] : ["↑ upgrade", "warn"]);
  else if (!upgrade && words.version(one) !== usual) found.push(["≠ differs", "warn"]);
  return found;
}

function cell(one, node, upgrade, usual, canAct, onPlan) {
  if (!one) return h("span", { class: "muted", title: "not installed" }, "–");
  return h(
    "span",
    {
      class: ["held", node.health === "offline" && "muted"],
      title: node.health === "offline" ? "as last reported" : one.digest || undefined,
    },
    h("code", null, words.version(one)),
    marks(one, node, upgrade, usual).map(([text, colour]) => h("span", { key: text, class: colour }, text)),
    canAct &&
      menuButton(`Actions for ${one.name} on ${node.name}`, () => [
        { label: "Upgrade here…", act: () => onPlan({ kind: "upgrade", names: [one.name], nodes: [node.name] }) },
        {
          label: "Install again…",
          act: () => onPlan({ kind: "install", names: [one.name], nodes: [node.name], force: true }),
        },
        (one.previous_digest || one.previous_version) && {
          label: "Roll back here…",
          act: () => onPlan({ kind: "rollback", names: [one.name], nodes: [node.name] }),
        },
        { label: "Delete here…", colour: "bad", act: () => removeBackend(one.name, [node]) },
      ]),
  );
}

function menu(name, holders, upgrade, onPlan) {
  return menuButton(`Actions for ${name}`, () => [
    {
      label: upgrade ? `Upgrade to ${upgrade.available_version || "the newer build"}…` : "Upgrade…",
      act: () => onPlan({ kind: "upgrade", names: [name] }),
    },
    { label: "Roll back…", act: () => onPlan({ kind: "rollback", names: [name] }) },
    { label: "Delete everywhere…", colour: "bad", act: () => removeBackend(name, null, holders.size) },
  ]);
}

function summed(holders, upgrade) {
  const counts = new Map();
  for (const one of holders.values()) counts.set(words.version(one), (counts.get(words.version(one)) || 0) + 1);
  const behind = upgrade ? (upgrade.nodes || []).filter((one) => !one.unknown).length : 0;
  return [
    [...counts]
      .sort((a, b) => b[1] - a[1])
      .map(([version, many]) => h("span", { key: version, class: "chip" }, `${version} × ${many}`)),
    behind > 0 && h("span", { class: "warn" }, ` ↑ ${words.count(behind, "node")} behind`),
  ];
}

function removeBackend(name, nodes, many = 1) {
  const where = nodes ? nodes.map((node) => node.name).join(", ") : words.count(many, "node");
  confirm({
    title: `Delete ${name}?`,
    button: `Delete it from ${where}`,
    word: nodes ? "" : name,
    text: "Its files are removed, and models that run on it there stop. What other backends share stays.",
    act: () =>
      attempt(
        () =>
          post("/api/operations", { kind: "delete", name, force: true, ...(nodes ? { nodes: nodes.map((node) => node.id) } : {}) }),
        (made) => accepted(made, `${name} is being deleted from ${where}.`),
      ),
  });
}
