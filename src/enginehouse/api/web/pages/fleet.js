// The fleet: what is so, what needs a person, then a panel per node. At the first start, what to do next.

import { attention, figure, heardAt, nameOf, truth, waitingRequests } from "../attention.js";
import { spark } from "../charts.js";
import { post, part } from "../client.js";
import { h, memo } from "../dom.js";
import * as history from "../history.js";
import { setQuery } from "../route.js";
import * as words from "../words.js";
import { addMachine, approve, approveAll, labelText, nodeActions, removeNode } from "../parts/nodes.js";
import { accepted, attempt } from "../parts/layers.js";
import { menuButton } from "../parts/menu.js";
import { age, empty, meter, pill } from "../parts/marks.js";
import { plots } from "../parts/plots.js";
import { firstSteps } from "../parts/first_steps.js";

export const title = ({ state }) => {
  const { healthy, nodes } = truth(state);
  return nodes ? `Fleet ${healthy}/${nodes}` : "Fleet";
};

export const enter = () => history.want();
export const leave = () => history.unwant();

export function view(context) {
  const { state, now, route, canAct } = context;
  const needs = attention(state, now);
  const search = (route.query.get("q") || "").toLowerCase();
  const approved = [...state.nodes.values()].filter((node) => node.approved || node.removedAt);
  approved.sort((a, b) => (a.name < b.name ? -1 : a.name > b.name ? 1 : 0));
  const shown = approved.filter((node) => !search || matches(node, search));
  if (!state.isListed && !approved.length) return h("p", { class: "muted" }, "Reading the fleet…");
  return [
    h(
      "div",
      { class: "head" },
      h("h1", null, sentence(state, now)),
      canAct && h("div", { class: "buttons" }, h("button", { onclick: () => addMachine() }, "Add a machine")),
    ),
    needsYou(needs, context),
    firstSteps(context, needs),
    approved.length > 5 &&
      h(
        "div",
        { class: "filters" },
        h("input", {
          type: "search",
          "data-search": true,
          "aria-label": "Search nodes",
          placeholder: "Search by name, label, model or backend  ( / )",
          value: route.query.get("q") || "",
          oninput: (event) => {
            setQuery("q", event.target.value);
            context.refresh();
          },
        }),
        h("span", { class: "muted" }, search ? `${shown.length} of ${words.count(approved.length, "node")}` : ""),
      ),
    h(
      "div",
      { class: "panels" },
      shown.map((node) => panel(node, context)),
    ),
    approved.length > 0 && !shown.length && empty(`No node matches “${search}”.`),
    approved.length > 0 && plots(),
  ];
}

function matches(node, search) {
  const texts = [
    node.name,
    node.status,
    node.platform,
    node.capability,
    ...Object.entries(node.labels || {}).flat(),
    ...(node.backends || []).map((one) => one.name),
    ...(node.replicas || []).map((one) => one.model_id),
  ];
  return texts.some((text) => String(text).toLowerCase().includes(search));
}

/** "4 of 5 nodes are healthy. jetson has been away for 3 h; 2 requests wait for it." */
export function sentence(state, now) {
  const nodes = [...state.nodes.values()].filter((node) => node.approved && !node.removedAt);
  if (!nodes.length) return "No machine has joined yet.";
  const { healthy } = truth(state);
  const away = nodes.filter((node) => node.health === "offline");
  const drained = nodes.filter((node) => node.drained && node.health !== "offline");
  const waiting = waitingRequests(state);
  const first =
    healthy === nodes.length
      ? nodes.length === 1
        ? `${nodes[0].name} is healthy.`
        : `All ${nodes.length} nodes are healthy.`
      : `${healthy} of ${words.count(nodes.length, "node")} ${healthy === 1 ? "is" : "are"} healthy.`;
  const more = [];
  if (away.length === 1) {
    const many = waiting.get(away[0].id) || 0;
    more.push(
      `${away[0].name} has been offline for ${words.span(now - heardAt(state, away[0]))}${many ? `; ${words.count(many, "request")} ${many === 1 ? "waits" : "wait"} for it` : ""}.`,
    );
  } else if (away.length) {
    more.push(`${words.names(away.map((node) => node.name))} are offline.`);
  }
  if (drained.length)
    more.push(`${words.names(drained.map((node) => node.name))} ${drained.length === 1 ? "is" : "are"} drained.`);
  return [first, ...more].join(" ");
}

function needsYou(needs, context) {
  const { state, now, canAct } = context;
  if (!state.isListed) return null;
  const nodes = [...state.nodes.values()].some((node) => node.approved);
  if (!needs.length)
    return nodes ? h("p", { class: "calm" }, h("span", { "aria-hidden": "true" }, "✓ "), "Nothing needs you.") : null;
  const pending = needs.filter((one) => one.kind === "pending");
  return h(
    "section",
    { class: "needs", "aria-label": "Needs you" },
    h(
      "header",
      null,
      h("h2", null, "Needs you"),
      canAct &&
        pending.length > 1 &&
        h("button", { onclick: () => approveAll(pending.map((one) => one.node)) }, `Approve all ${pending.length}`),
    ),
    h(
      "ul",
      null,
      needs.slice(0, 12).map((one) =>
        h(
          "li",
          { key: one.key, class: one.colour },
          h("span", { class: "text" }, one.text, one.kind === "pending" && fingerprint(one.node, now)),
          h(
            "span",
            { class: "buttons" },
            one.link &&
              h("a", { href: one.link }, one.action && one.action.name === "link" ? one.action.label : "Show"),
            canAct &&
              one.kind === "pending" &&
              h("button", { class: "main", onclick: () => approve(one.node) }, "Approve"),
            canAct && one.kind === "pending" && h("button", { onclick: () => removeNode(one.node, "Deny") }, "Deny"),
            canAct &&
              one.kind === "failed" &&
              h("button", { onclick: () => retry(one.operation, nameOf(state)) }, "Retry"),
            canAct &&
              one.kind === "failed" &&
              h(
                "button",
                {
                  class: "quiet",
                  onclick: () => attempt(() => post(`/api/operations/${one.operation.jobID}/dismiss`)),
                },
                "Dismiss",
              ),
          ),
        ),
      ),
    ),
    needs.length > 12 && h("p", { class: "muted" }, `and ${needs.length - 12} more`),
  );
}

function fingerprint(node, now) {
  return h(
    "small",
    null,
    " ",
    node.fingerprint ? h("code", null, node.fingerprint) : "without a key of its own",
    ` · ${node.platform || "unknown platform"} · asked ${words.ago(words.seconds(node.created_at), now)}`,
  );
}

function retry(operation, name) {
  return attempt(
    () => post(`/api/operations/${part(operation.jobID)}/retry`),
    (made) => accepted(made, `${words.title(operation, name)} is tried again.`),
  );
}

function panel(node, context) {
  const { state, now, canAct } = context;
  const vitals = state.vitals.get(node.id);
  const heard = heardAt(state, node);
  const waiting = waitingRequests(state).get(node.id) || 0;
  const lines = history.ofNode(node.id);
  const isAway = node.health === "offline" || Boolean(node.removedAt);
  // Apart from the header, whose age changes every second.
  const rest = memo(`rest of panel ${node.id}`, [node, vitals, waiting, lines], () => {
    const free = (name) => figure(state, node, name);
    const used = (total, available) => (total && available !== null ? total - available : null);
    const cards =
      [...new Set((node.gpu_cards || []).map((card) => card.name).filter(Boolean))].join(", ") || node.gpu_vendor;
    return [
      h(
        "p",
        { class: "muted facts" },
        [cards, node.platform, labelText(node), node.worker_version && `v${node.worker_version}`]
          .filter(Boolean)
          .join(" · "),
      ),
      h(
        "div",
        { class: "meters" },
        node.total_vram
          ? meter(
              "VRAM",
              used(node.total_vram, free("available_vram")),
              node.total_vram,
              words.bytesOf(used(node.total_vram, free("available_vram")), node.total_vram),
            )
          : null,
        meter(
          "RAM",
          used(node.total_ram, free("available_ram")),
          node.total_ram,
          words.bytesOf(used(node.total_ram, free("available_ram")), node.total_ram),
        ),
        meter("CPU", free("used_cores"), node.cores, `${words.rate(free("used_cores"))} of ${node.cores}`),
        meter(
          "Disk",
          used(node.total_disk, free("available_disk")),
          node.total_disk,
          words.bytesOf(used(node.total_disk, free("available_disk")), node.total_disk),
        ),
      ),
      h(
        "div",
        { class: "has" },
        (node.replicas || []).length ? chips(node.replicas) : h("span", { class: "muted" }, "no models"),
        h("span", { class: "grow" }),
        lines && spark(lines, { label: "requests or memory in the last hour" }),
        vitals && !isAway && h("span", { class: "number" }, `${words.rate(vitals.requests_per_second)} req/s`),
      ),
      h(
        "p",
        { class: "backends" },
        (node.backends || [])
          .filter((one) => !one.is_meta)
          .map((one) =>
            h(
              "span",
              { key: one.name, class: ["chip", one.is_broken && "bad"], title: one.digest || undefined },
              one.name,
              " ",
              h("small", null, words.version(one)),
            ),
          ),
        !(node.backends || []).length && h("span", { class: "muted" }, "no backends"),
      ),
      waiting > 0 &&
        h("p", { class: "waiting" }, `${words.count(waiting, "request")} ${waiting === 1 ? "waits" : "wait"} for it`),
    ];
  });
  return memo(`panel ${node.id}`, [node, rest, words.ago(heard, now), canAct], () =>
    h(
      "article",
      {
        key: node.id,
        class: ["panel", isAway && "away", node.removedAt && "gone"],
        "data-row": true,
        tabindex: "0",
        "aria-label": node.name,
        onkeydown: (event) => {
          if (event.key === "Enter" && event.target === event.currentTarget)
            location.hash = `#/nodes/${encodeURIComponent(node.name)}`;
        },
      },
      h(
        "header",
        null,
        h("h2", null, h("a", { href: `#/nodes/${encodeURIComponent(node.name)}` }, node.name)),
        pill(words.nodeMark(node)),
        h("span", { class: "grow" }),
        h("span", { class: "muted" }, isAway ? "last known " : "", age(heard, now)),
        canAct && !node.removedAt && menuButton(`Actions for ${node.name}`, () => nodeActions(node)),
      ),
      rest,
    ),
  );
}

function chips(replicas) {
  const counts = new Map();
  for (const one of replicas) counts.set(one.model_id, (counts.get(one.model_id) || 0) + 1);
  return [...counts].map(([model, many]) =>
    h(
      "a",
      { key: model, class: "chip model", href: `#/models/${encodeURIComponent(model)}` },
      model,
      many > 1 && ` ×${many}`,
    ),
  );
}
