// The plan of a request, before anything happens: per node what it would do, how much it loads, and why a node is left out.

import { post } from "../client.js";
import { h } from "../dom.js";
import { changed, state } from "../live.js";
import * as words from "../words.js";
import { accepted, attempt, open, say } from "./layers.js";
import { mono, note, table } from "./marks.js";

const VERBS = { install: "Install", upgrade: "Upgrade", rollback: "Roll back", delete: "Delete" };

/** Plans one or more names as one request each, and asks before it sends them. */
export async function openPlan({ kind, names, nodes, force = false }) {
  const plans = new Map();
  const failures = new Map();
  const left = new Set(); // ids of nodes that the person has taken out
  let isSending = false;
  const body = (name, chosen = nodes) => ({
    kind,
    name,
    ...(chosen ? { nodes: chosen } : {}),
    ...(force ? { force } : {}),
  });
  const affected = (plan) => wouldChange(plan).filter((one) => !left.has(one.node_id));
  const toggle = (id) => {
    if (!left.delete(id)) left.add(id);
    changed(true);
  };
  open(`${VERBS[kind]} ${words.names(names)}${nodes ? ` on ${words.names(nodes)}` : ""}`, view, { isDrawer: true });
  await Promise.all(
    names.map(async (name) => {
      try {
        if (kind !== "rollback") plans.set(name, await post("/api/operations/plan", body(name)));
      } catch (error) {
        failures.set(name, error.message);
      }
      changed(true);
    }),
  );

  function view(close, { canAct }) {
    // Known from the reports, which may still arrive while this is open.
    if (kind === "rollback") for (const name of names) plans.set(name, rollbackPlan(name, nodes));
    if (plans.size + failures.size < names.length)
      return h("p", { class: "muted" }, "Asking the registries what each node would get…");
    const changing = [...plans].filter(([, plan]) => affected(plan).length);
    const many = new Set(changing.flatMap(([, plan]) => affected(plan).map((one) => one.node_id))).size;
    return [
      [...failures].map(([name, text]) => h("div", { key: name }, note(`${name}: ${text}`, "bad"))),
      [...plans].map(([name, plan]) =>
        h("section", { key: name }, names.length > 1 && h("h3", null, name), planned(plan, left, canAct && toggle)),
      ),
      h(
        "div",
        { class: "buttons" },
        canAct &&
          h(
            "button",
            {
              class: "main",
              disabled: !many || isSending,
              onclick: () =>
                send(
                  close,
                  changing.map(([name]) => name),
                ),
            },
            many ? `${VERBS[kind]} on ${words.count(many, "node")}` : "Nothing to do",
          ),
        h("button", { onclick: close }, canAct ? "Cancel" : "Close"),
      ),
    ];
  }

  async function send(close, chosen) {
    isSending = true;
    changed(true);
    let last;
    for (const name of chosen) {
      // Whoever takes no node out asks for all of them, as the plan says it: also those that were away.
      const some = left.size ? affected(plans.get(name)).map((one) => one.node_id) : nodes;
      last = (await attempt(() => post("/api/operations", body(name, some)))) || last;
    }
    isSending = false;
    if (!last) return;
    close();
    if (chosen.length === 1) accepted(last, `${VERBS[kind]} of ${chosen[0]} was accepted.`);
    else say(`${words.count(chosen.length, "operation")} were accepted.`, { link: "#/operations" });
  }
}

/** The version of the build that the node has now; "" if it has none. */
function held({ node_id, backend }) {
  const found = ((state.nodes.get(node_id) || {}).backends || []).find((one) => one.name === backend);
  return found ? words.version(found) : "";
}

const wouldChange = (plan) => (plan.nodes || []).filter((one) => one.does !== "nothing");

/** What a rollback would do is known from the reports; the API plans only what a gallery resolves. */
function rollbackPlan(name, nodes) {
  const found = { kind: "rollback", name, nodes: [], excluded: [] };
  for (const node of state.nodes.values()) {
    const held = (node.backends || []).find((one) => one.name === name);
    if (!held || node.removedAt || (nodes && !nodes.includes(node.name))) continue;
    const before = held.previous_version || (held.previous_digest || "").replace("sha256:", "").slice(0, 12);
    if (before)
      found.nodes.push({
        node_id: node.id,
        node_name: node.name,
        node_status: node.status,
        does: "roll back",
        version: before,
        installed_version: words.version(held),
        backend: name,
      });
    else found.excluded.push({ node_id: node.id, node_name: node.name, reason: "it has kept no version to return to" });
  }
  return found;
}

function planned(plan, left, toggle) {
  const doing = wouldChange(plan).filter((one) => !left.has(one.node_id));
  const total = doing.reduce((sum, one) => sum + (one.download_bytes || 0), 0);
  const canChoose = toggle && wouldChange(plan).length > 1;
  return [
    h(
      "p",
      null,
      doing.length ? `${words.count(doing.length, "node")} would change` : "No node would change",
      total ? `, at most ${words.bytes(total)} to download` : "",
      (plan.excluded || []).length ? `; ${words.count(plan.excluded.length, "node")} left out` : "",
      ".",
    ),
    (plan.canaries || []).length > 0 &&
      h(
        "p",
        { class: "muted" },
        `Begins with ${words.names(plan.canaries)}; the others follow when the new version has proven itself there, else it is taken back.`,
      ),
    plan.max_parallel > 0 &&
      h(
        "p",
        { class: "muted" },
        `At most ${words.count(plan.max_parallel, "node")} at once, so that the others go on serving.`,
      ),
    (plan.nodes || []).length > 0 &&
      table(
        [
          {
            name: "Node",
            view: (one) => [
              canChoose && one.does !== "nothing"
                ? h(
                    "label",
                    { class: "choice" },
                    h("input", {
                      type: "checkbox",
                      checked: !left.has(one.node_id),
                      onchange: () => toggle(one.node_id),
                    }),
                    " ",
                    one.node_name,
                  )
                : one.node_name,
              one.node_status !== "healthy" && h("small", null, ` ${one.node_status}`),
            ],
          },
          { name: "Does", view: (one) => one.does },
          {
            name: "Build",
            view: (one) => [one.backend || "", one.capability && h("small", null, ` ${one.capability}`)],
          },
          {
            name: "Version",
            view: (one) => {
              const before = one.installed_version || held(one);
              return [
                before && before !== words.version(one) && h("span", { class: "muted" }, before, " → "),
                mono(words.version(one), one.digest),
              ];
            },
          },
          { name: "Download", isNumber: true, view: (one) => words.bytes(one.download_bytes || null) },
          {
            name: "Disk free",
            isNumber: true,
            view: (one) =>
              h(
                "span",
                { class: one.download_bytes && one.free_disk_bytes < 3 * one.download_bytes ? "warn" : "" },
                words.bytes(one.free_disk_bytes),
              ),
          },
          plan.nodes.some((one) => one.note) && { name: "Remark", isWide: true, view: (one) => one.note || "" },
        ].filter(Boolean),
        plan.nodes,
        { label: "Plan per node", key: (one) => one.node_id },
      ),
    (plan.excluded || []).length > 0 &&
      h(
        "ul",
        { class: "plain" },
        plan.excluded.map((one) =>
          h(
            "li",
            { key: one.node_id },
            h("strong", null, one.node_name),
            h("span", { class: "muted" }, ` is left out: ${one.reason}`),
          ),
        ),
      ),
  ];
}

/** An install of a gallery's entry; its nodes are chosen in the plan. */
export function openInstall(offer) {
  const name = offer.gallery ? `${offer.gallery.name}@${offer.name}` : offer.name;
  openPlan({ kind: "install", names: [name] });
}
