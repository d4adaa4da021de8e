// The frame of every page: navigation, the line of truth, the strip of running operations, and how fresh all of it is.

import { nameOf, truth } from "../attention.js";
import { remove } from "../client.js";
import { h, memo } from "../dom.js";
import { PLACES } from "../keys.js";
import { isFresh } from "../live.js";
import { current } from "../route.js";
import { isEnded } from "../state.js";
import * as words from "../words.js";
import { attempt, openHelp } from "./layers.js";
import { bar, pill } from "./marks.js";

const ENDED_SECONDS = 8; // that an operation stays in the strip when it has ended
const SHOWN = 3; // running operations in the strip; the others are a link
const PARTS_OF = { nodes: "fleet", catalogue: "backends", audit: "access" };

let arePagesShown = false; // on a phone, those that have no room beside the others

export function foldPages() {
  arePagesShown = false;
}

export function shell(context, view) {
  const { state } = context;
  const needs = context.needs.length;
  return h(
    "div",
    { class: "shell" },
    h(
      "a",
      {
        class: "skip",
        href: "#main",
        onclick: (event) => {
          event.preventDefault();
          document.getElementById("main").focus();
        },
      },
      "Skip to the content",
    ),
    navigation(context),
    h(
      "div",
      { class: "body" },
      h(
        "header",
        { class: "top" },
        h(
          "p",
          { class: "truth" },
          // Whoever may not read the stream learns so; nothing is being read then.
          (context.connection.status === "refused" && !state.isListed ? [] : truth(state).pieces).map((piece) =>
            h("span", null, piece),
          ),
          needs > 0 && h("a", { href: "#/fleet" }, `${words.count(needs, "thing")} ${needs === 1 ? "needs" : "need"} you`),
        ),
        freshness(context),
      ),
      strip(context),
      h("main", { id: "main", tabindex: "-1" }, view),
    ),
  );
}

function navigation(context) {
  const { page } = current();
  const here = PARTS_OF[page] || page;
  const needs = context.needs.length;
  return h(
    "nav",
    { "aria-label": "Pages", class: arePagesShown ? "unfolded" : "" },
    h("div", { class: "brand" }, "Enginehouse"),
    h(
      "ul",
      null,
      Object.entries(PLACES).map(([key, [address, name]]) =>
        h(
          "li",
          { key: address },
          h(
            "a",
            { href: `#/${address}`, "aria-current": here === address ? "page" : undefined, title: `g ${key}` },
            name,
            address === "fleet" &&
              needs > 0 &&
              h("span", { class: "badge", "aria-label": `${needs} things need you` }, needs),
          ),
        ),
      ),
      // On a phone: the pages that have no room beside the others.
      h(
        "li",
        { key: "more", class: "folder" },
        h(
          "button",
          {
            class: "quiet",
            "aria-expanded": arePagesShown ? "true" : "false",
            onclick: () => {
              arePagesShown = !arePagesShown;
              context.refresh();
            },
          },
          arePagesShown ? "Less" : "More",
        ),
      ),
    ),
    h(
      "div",
      { class: "foot" },
      h(
        "span",
        { class: "who", title: `role: ${context.session.role}` },
        context.session.name,
        context.canAct ? "" : " (read-only)",
      ),
      h("span", null, context.session.version && `v${context.session.version}`),
      h(
        "div",
        null,
        h(
          "button",
          {
            class: "quiet",
            "aria-label": "Switch between light and dark",
            title: "Light or dark",
            onclick: switchTheme,
          },
          "◐",
        ),
        h("button", { class: "quiet", "aria-label": "Keys", title: "Keys (?)", onclick: openHelp }, "?"),
        h("button", { class: "quiet", onclick: () => signOut(context) }, "Sign out"),
      ),
    ),
  );
}

async function signOut(context) {
  await attempt(
    () => remove("/api/session"),
    () => context.signOut(),
  );
}

function switchTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("enginehouse.theme", root.dataset.theme);
}

function freshness({ connection }) {
  const age = connection.heardAt ? Date.now() / 1000 - connection.heardAt : null;
  if (isFresh(connection)) {
    return h("p", { class: "fresh ok", role: "status" }, h("span", { "aria-hidden": "true" }, "●"), " live");
  }
  const since = age === null ? "no data yet" : `data ${words.span(age)} old`;
  const word =
    connection.status === "refused"
      ? "not allowed"
      : connection.status === "connecting"
        ? "connecting"
        : "reconnecting";
  return h(
    "p",
    {
      class: ["fresh", connection.status === "connecting" ? "idle" : "warn"],
      role: "status",
      title: connection.error || undefined,
    },
    h("span", { "aria-hidden": "true" }, "◌"),
    ` ${word} · `,
    h("span", null, since),
  );
}

function strip(context) {
  const open = [...context.state.operations.values()].filter((one) => !isEnded(one));
  const running = open.filter((one) => !one.isParked).sort((a, b) => (a.createdAt < b.createdAt ? -1 : 1));
  const parked = open.length - running.length;
  const seconds = Date.now() / 1000;
  const ended = [...context.state.operations.values()].filter((one) => seconds - (one.endedHere || 0) < ENDED_SECONDS);
  if (!open.length && !ended.length) return null;
  return h(
    "div",
    { class: "strip", "aria-label": "Running operations" },
    running
      .slice(0, SHOWN)
      .map((one) => memo(`strip ${one.jobID}`, [one, context.state.nodes.get(one.name)], () => line(one, context))),
    ended
      .slice(-SHOWN)
      .map((one) => memo(`strip ${one.jobID}`, [one, context.state.nodes.get(one.name)], () => endedLine(one, context))),
    running.length > SHOWN &&
      h("a", { key: "more", class: "more", href: "#/operations" }, `and ${running.length - SHOWN} more`),
    parked > 0 &&
      h(
        "a",
        { key: "parked", class: "more", href: "#/operations" },
        `${words.count(parked, "operation")} ${parked === 1 ? "waits" : "wait"} for offline nodes`,
      ),
  );
}

function endedLine(operation, context) {
  return h(
    "a",
    { key: operation.jobID, class: "running ended", href: `#/operations/${operation.jobID}` },
    h("span", { class: "name" }, words.title(operation, nameOf(context.state))),
    h("span", { class: "count" }, words.doneOf(operation)),
    h("span", null, pill(words.operationMark(operation))),
  );
}

function line(operation, context) {
  const { totals } = operation;
  return h(
    "a",
    { key: operation.jobID, class: "running", href: `#/operations/${operation.jobID}` },
    h("span", { class: "name" }, words.title(operation, nameOf(context.state))),
    h("span", { class: "count" }, words.doneOf(operation)),
    bar(totals.percent, {
      label: words.title(operation, nameOf(context.state)),
      colour: (operation.counts || {}).error ? "warn" : "",
    }),
    h("span", { class: "amount" }, words.amountOf(operation)),
    h("span", { class: "amount" }, words.rateText(operation, totals.currentBytes < totals.totalBytes)),
    h("span", { class: "left" }, words.timeLeft(operation)),
  );
}
