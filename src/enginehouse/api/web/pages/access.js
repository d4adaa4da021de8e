// Who may do what, and who did: tokens, sessions of the page, usage, and the audit. Each part has its own address.
//
// The stream tells nothing of these lists, so the shown one is read again with each of its pulses, every five seconds.

import { get } from "../client.js";
import { h } from "../dom.js";
import { changed, state, subscribe } from "../live.js";
import { current, go } from "../route.js";
import * as words from "../words.js";
import { audit } from "../parts/audit_list.js";
import { attempt } from "../parts/layers.js";
import { loginLink, sessions } from "../parts/sessions.js";
import { createToken, tokens } from "../parts/tokens.js";
import { usage } from "../parts/usage.js";

const TABS = [
  ["tokens", "Tokens and keys"],
  ["sessions", "Sessions"],
  ["usage", "Usage"],
  ["audit", "Audit"],
];
let found = {}; // answers by tab
let problem = "";
let auditNext = "";
let isLonger = false; // than one page, because a person asked for more: then it stays as it is
let pulse = null; // the one that the list was read with
let unfollow = () => {};

export const title = () => "Access";

const PATHS = {
  tokens: () => "/api/tokens",
  sessions: () => "/api/sessions",
  audit: () => "/api/audit?limit=100",
  usage: (query) =>
    `/api/usage?by=${query.get("by") || "token,model"}${query.get("days") ? `&from=${Math.floor(Date.now() / 1000 - 86400 * Number(query.get("days")))}` : ""}`,
};

export async function enter({ route }) {
  found = {};
  isLonger = false;
  pulse = state.traffic;
  unfollow = subscribe(follow);
  await read(route.parts[0] || "tokens", route.query);
}

export function leave() {
  unfollow();
}

function follow() {
  if (state.traffic === pulse || document.hidden || isLonger) return;
  pulse = state.traffic;
  reread();
}

async function read(tab, query) {
  problem = "";
  try {
    const answer = await get(PATHS[tab](query));
    if (tab === "audit") {
      found.audit = answer.audit;
      auditNext = answer.next || "";
    } else {
      found[tab] = answer.sessions || answer;
    }
  } catch (error) {
    problem = error.message;
  }
  changed(true);
}

export function view(context) {
  const { route, canAct } = context;
  const tab = route.parts[0] || "tokens";
  const parts = { tokens, sessions, usage, audit };
  return [
    h(
      "div",
      { class: "head" },
      h("h1", null, sentence(tab)),
      canAct &&
        h(
          "div",
          { class: "buttons" },
          tab === "tokens" && h("button", { class: "main", onclick: () => createToken(reread) }, "Create a token"),
          tab === "sessions" && h("button", { class: "main", onclick: loginLink }, "Make a login link"),
        ),
    ),
    h(
      "div",
      { class: "tabs", role: "tablist", "aria-label": "Access" },
      TABS.map(([key, label]) =>
        h(
          "button",
          { key, role: "tab", "aria-selected": key === tab ? "true" : "false", onclick: () => go(`/access/${key}`) },
          label,
        ),
      ),
    ),
    problem
      ? h("p", { class: "note bad" }, problem)
      : found[tab]
        ? (parts[tab] || tokens)(found[tab], context, reread, auditNext && moreAudit)
        : h("p", { class: "muted" }, "Reading…"),
  ];
}

function sentence(tab) {
  const list = found[tab];
  if (!list) return "Access";
  if (tab === "tokens") return `${words.count(list.filter((one) => !one.expired).length, "token")} can be used.`;
  if (tab === "sessions")
    return `${words.count(list.length, "session")} of this page ${list.length === 1 ? "is" : "are"} open.`;
  if (tab === "usage")
    return `${words.count(list.total.requests, "request")}, ${words.count(list.total.prompt_tokens + list.total.completion_tokens, "token")} since ${words.absolute(words.seconds(list.from))}.`;
  return "Who did what, when, from where.";
}

/** Reads the shown part again, with what is in the address by now. */
function reread() {
  const { parts, query } = current();
  return read(parts[0] || "tokens", query);
}

async function moreAudit() {
  await attempt(
    () => get(`/api/audit?limit=100&before=${encodeURIComponent(auditNext)}`),
    (answer) => {
      isLonger = true;
      found.audit = [...found.audit, ...answer.audit];
      auditNext = answer.next || "";
    },
  );
}
