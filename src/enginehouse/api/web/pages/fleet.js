// The fleet: what is so, what needs a person, then a panel per node. At the first start, what to do next.

import { heardAt, isArriving, nameOf, truth, waitingRequests } from "../attention.js";
import { post, part } from "../client.js";
import { h, memo } from "../dom.js";
import * as history from "../history.js";
import { isFresh } from "../live.js";
import { setQuery } from "../route.js";
import * as words from "../words.js";
import { nodePanel } from "../parts/node_panel.js";
import { addMachine } from "../parts/add_machine.js";
import { approve, approveAll, rejectNode } from "../parts/nodes.js";
import { accepted, attempt } from "../parts/layers.js";
import { empty } from "../parts/marks.js";
import { plots } from "../parts/plots.js";
import { firstSteps } from "../parts/first_steps.js";

export const title = ({ state }) => {
  const { healthy, nodes } = truth(state);
  return nodes ? `Fleet ${healthy}/${nodes}` : "Fleet";
};

export const enter = () => history.want();
export const leave = () => history.unwant();

export function view(context) {
  const { state, now, route, canAct, needs } = context;
  const search = (route.query.get("q") || "").toLowerCase();
  const approved = [...state.nodes.values()].filter((node) => node.approved || node.removedAt);
  approved.sort((a, b) => (a.name < b.name ? -1 : a.name > b.name ? 1 : 0));
  const usual = memo("usual versions", approved, () => words.usualVersions(approved));
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
      shown.map((node) => nodePanel(node, context, usual)),
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
  const arriving = nodes.filter((node) => isArriving(state, node, now));
  const away = nodes.filter((node) => node.health === "offline" && !arriving.includes(node));
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
  if (arriving.length)
    more.push(
      `${words.names(arriving.map((node) => node.name))} ${arriving.length === 1 ? "is" : "are"} approved and about to connect.`,
    );
  if (drained.length)
    more.push(`${words.names(drained.map((node) => node.name))} ${drained.length === 1 ? "is" : "are"} drained.`);
  return [first, ...more].join(" ");
}

/** That nothing needs a person, or did when anything was last heard. */
function calm({ connection }) {
  if (isFresh(connection))
    return h("p", { class: "calm" }, h("span", { "aria-hidden": "true" }, "✓ "), "Nothing needs you.");
  return h("p", { class: "muted" }, `Nothing needed you ${words.ago(connection.heardAt, Date.now() / 1000)}.`);
}

function needsYou(needs, context) {
  const { state, now, canAct } = context;
  if (!state.isListed) return null;
  const nodes = [...state.nodes.values()].some((node) => node.approved);
  if (!needs.length)
    return nodes ? calm(context) : null;
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
            canAct && one.kind === "pending" && h("button", { onclick: () => rejectNode(one.node) }, "Deny"),
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
