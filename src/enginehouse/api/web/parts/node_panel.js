// A node as a panel: its state, what of it is in use, what it runs and has installed, and what waits for it.

import { figure, heardAt, waitingRequests } from "../attention.js";
import { h, memo } from "../dom.js";
import * as history from "../history.js";
import * as words from "../words.js";
import { menuButton } from "./menu.js";
import { age, meter, pill } from "./marks.js";
import { drainState, labelText, nodeActions } from "./nodes.js";

export function nodePanel(node, context, usual) {
  const { state, now, canAct } = context;
  const vitals = state.vitals.get(node.id);
  const heard = heardAt(state, node);
  const waiting = waitingRequests(state).get(node.id) || 0;
  const lines = history.linesOf(node.id);
  const isAway = node.health === "offline" || Boolean(node.removedAt);
  const drained = drainState(node, context);
  // Apart from the header, whose age changes every second.
  const rest = memo(`rest of panel ${node.id}`, [node, vitals, waiting, lines, usual, drained && drained.text], () => {
    const free = (name) => figure(state, node, name);
    const used = (total, available) => (total && available !== null ? total - available : null);
    const memory = (name, line, total, available) =>
      meter(name, used(total, available), total, words.bytesOf(used(total, available), total), {
        line: lines && lines[line],
      });
    const cards =
      [...new Set((node.gpu_cards || []).map((card) => card.name).filter(Boolean))].join(", ") || node.gpu_vendor;
    return [
      h(
        "p",
        { class: "muted facts" },
        [cards, node.platform, labelText(node), node.worker_version && `v${node.worker_version}${node.behind ? " (behind)" : ""}`]
          .filter(Boolean)
          .join(" · "),
      ),
      h(
        "div",
        { class: "meters" },
        node.total_vram ? memory("VRAM", "used_vram", node.total_vram, free("available_vram")) : null,
        memory("RAM", "used_ram", node.total_ram, free("available_ram")),
        meter("CPU", free("used_cores"), node.cores, `${words.rate(free("used_cores"))} of ${node.cores}`, {
          line: lines && lines.used_cores,
          isBadWhenFull: false,
        }),
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
              one.is_broken && " broken",
              usual.get(one.name) !== words.version(one) &&
                h("span", { class: "warn", title: `most nodes have ${usual.get(one.name)}` }, " ≠"),
            ),
          ),
        !(node.backends || []).length && h("span", { class: "muted" }, "no backends"),
      ),
      drained && h("p", { class: drained.isSafe ? "muted" : "waiting" }, drained.text),
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
