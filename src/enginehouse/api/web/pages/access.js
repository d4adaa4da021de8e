// Who may do what, and who did: tokens, sessions of the page, usage, and the audit. Each part has its own address.

import { get, part, post, remove } from "../client.js";
import { h } from "../dom.js";
import { changed } from "../live.js";
import { go, setQuery } from "../route.js";
import * as words from "../words.js";
import { attempt, confirm, copy, open, say } from "../parts/layers.js";
import { age, empty, mono, table } from "../parts/marks.js";

const TABS = [["tokens", "Tokens and keys"], ["sessions", "Sessions"], ["usage", "Usage"], ["audit", "Audit"]];
let found = {}; // answers by tab
let problem = "";
let auditNext = "";

export const title = () => "Access";

const PATHS = { tokens: () => "/api/tokens", sessions: () => "/api/sessions", audit: () => "/api/audit?limit=100", usage: (query) => `/api/usage?by=${query.get("by") || "token,model"}${query.get("days") ? `&from=${Math.floor(Date.now() / 1000 - 86400 * Number(query.get("days")))}` : ""}` };

export async function enter({ route }) {
  found = {};
  await read(route.parts[0] || "tokens", route.query);
}

async function read(tab, query) {
  problem = "";
  try {
    const answer = await get(PATHS[tab](query));
    if (tab === "audit") {
      found.audit = answer.entries || answer.audit || answer;
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
    h("div", { class: "head" }, h("h1", null, sentence(tab)),
      canAct && h("div", { class: "buttons" }, tab === "tokens" && h("button", { class: "main", onclick: () => create(route) }, "Create a token"), tab === "sessions" && h("button", { class: "main", onclick: loginLink }, "Make a login link"))),
    h("div", { class: "tabs", role: "tablist", "aria-label": "Access" }, TABS.map(([key, label]) => h("button", { key, role: "tab", "aria-selected": key === tab ? "true" : "false", onclick: () => go(`/access/${key}`) }, label))),
    problem ? h("p", { class: "note bad" }, problem) : found[tab] ? (parts[tab] || tokens)(found[tab], context) : h("p", { class: "muted" }, "Reading…"),
  ];
}

function sentence(tab) {
  const list = found[tab];
  if (!list) return "Access";
  if (tab === "tokens") return `${words.count(list.filter((one) => !one.expired).length, "token")} can be used.`;
  if (tab === "sessions") return `${words.count(list.length, "session")} of this page ${list.length === 1 ? "is" : "are"} open.`;
  if (tab === "usage") return `${words.count(list.total.requests, "request")}, ${words.count(list.total.prompt_tokens + list.total.completion_tokens, "token")} since ${words.absolute(words.seconds(list.from))}.`;
  return "Who did what, when, from where.";
}

function tokens(list, { now, canAct, route }) {
  if (!list.length) return empty("There is no token.");
  return table([
    { name: "Name", view: (one) => [one.name, one.expired && h("span", { class: "bad" }, " expired")] },
    { name: "Role", view: (one) => one.role },
    { name: "For", isWide: true, view: (one) => [one.node && `the node ${one.node}`, (one.models || []).join(", "), one.requests_per_minute && `${one.requests_per_minute} requests a minute`, one.tokens_per_minute && `${one.tokens_per_minute} tokens a minute`].filter(Boolean).join(" · ") || "everything of its role" },
    { name: "Created", view: (one) => age(words.seconds(one.created_at), now) },
    { name: "Expires", view: (one) => (one.expires_at ? words.absolute(words.seconds(one.expires_at)) : "never") },
    { name: "", view: (one) => canAct && h("button", { "aria-label": `Revoke ${one.name}`, onclick: () => revoke(one, route) }, "Revoke…") },
  ], list, { label: "Tokens" });
}

function revoke(one, route) {
  confirm({
    title: `Revoke ${one.name}?`, button: `Revoke ${one.name}`, text: `Whoever uses this ${one.role} token is refused within a second, on every frontend. Sessions that were opened with it end.`,
    act: () => attempt(() => remove(`/api/tokens/${part(one.id)}`), () => { say(`${one.name} is revoked.`); read("tokens", route.query); }),
  });
}

function create(route) {
  const form = { role: "user", name: "", models: "", requests_per_minute: 0, tokens_per_minute: 0, days: 0 };
  const input = (label, name, more = {}) => h("label", { class: "field" }, label, h("input", { value: form[name], oninput: (event) => { form[name] = more.type === "number" ? Number(event.target.value || 0) : event.target.value; }, ...more }));
  open("Create a token", (close) => [
    h("label", { class: "field" }, "What it is for", h("select", { onchange: (event) => { form.role = event.target.value; changed(true); } }, [["user", "applications: may ask models (user)"], ["viewer", "people who look: may read everything, change nothing (viewer)"], ["admin", "people who operate: may do everything (admin)"], ["join", "machines: may ask to join (join)"]].map(([role, text]) => h("option", { key: role, value: role, selected: role === form.role }, text)))),
    input("Name (left out: made up)", "name", { class: "mono" }),
    form.role === "user" && [input("Only these models (names or patterns, separated by commas; left out: all)", "models", { class: "mono" }), input("Requests per minute (0: no limit)", "requests_per_minute", { type: "number", min: 0 }), input("Tokens per minute (0: no limit)", "tokens_per_minute", { type: "number", min: 0 })],
    input("Expires after so many days (0: never)", "days", { type: "number", min: 0 }),
    h("div", { class: "buttons" }, h("button", { class: "main", onclick: () => attempt(() => post("/api/tokens", bodyOf(form)), (made) => { close(); showToken(made); read("tokens", route.query); }) }, "Create the token"), h("button", { onclick: close }, "Cancel")),
  ]);
}

function bodyOf(form) {
  const models = form.models.split(",").map((one) => one.trim()).filter(Boolean);
  const limits = form.role === "user" ? { models, requests_per_minute: form.requests_per_minute, tokens_per_minute: form.tokens_per_minute } : {};
  return { role: form.role, ...(form.name.trim() ? { name: form.name.trim() } : {}), ...limits, ttl_seconds: 86400 * form.days };
}

function showToken(made) {
  open(`The token ${made.name}`, (close) => [h("p", null, "It is shown this once; only its hash is stored."), h("pre", { class: "line" }, made.token), h("div", { class: "buttons" }, h("button", { class: "main", onclick: () => copy(made.token) }, "Copy"), h("button", { onclick: close }, "Close"))]);
}

async function loginLink() {
  let role = "viewer";
  let made = null;
  open("Make a login link", (close) => (made ? [
    h("p", null, `Whoever opens it first is signed in as ${role}. It works once, for ten minutes.`), h("pre", { class: "line" }, made.url),
    h("div", { class: "buttons" }, h("button", { class: "main", onclick: () => copy(made.url) }, "Copy"), h("button", { onclick: close }, "Close"))] : [
    h("label", { class: "field" }, "Role", h("select", { onchange: (event) => { role = event.target.value; } }, [["viewer", "viewer: may look"], ["admin", "admin: may do everything"]].map(([key, text]) => h("option", { key, value: key, selected: key === role }, text)))),
    h("div", { class: "buttons" }, h("button", { class: "main", onclick: () => attempt(() => post("/api/session/links", { role }), (answer) => { made = answer; }) }, "Make the link"), h("button", { onclick: close }, "Cancel"))]));
}

function sessions(list, { now, canAct, route }) {
  if (!list.length) return empty("No session is open.");
  return table([
    { name: "Name", view: (one) => [one.name, one.is_current && h("strong", null, " (this one)")] },
    { name: "Role", view: (one) => one.role },
    { name: "From", view: (one) => mono(one.address || "–") },
    { name: "Since", view: (one) => age(words.seconds(one.created_at), now) },
    { name: "Until", view: (one) => words.absolute(words.seconds(one.expires_at)) },
    { name: "", view: (one) => canAct && !one.is_current && h("button", { onclick: () => attempt(() => remove(`/api/sessions/${part(one.id)}`), () => { say("The session has ended."); read("sessions", route.query); }) }, "End") },
  ], list, { label: "Sessions" });
}

function usage(answer, { route }) {
  const by = route.query.get("by") || "token,model";
  const pick = (name, value, options) => h("select", { "aria-label": name, onchange: (event) => { setQuery(name, event.target.value); enter({ route: { parts: ["usage"], query: new URLSearchParams(location.hash.split("?")[1] || "") } }); } }, options.map(([key, text]) => h("option", { key, value: key, selected: key === value }, text)));
  const names = by.split(",");
  return [
    h("div", { class: "filters" },
      pick("by", by, [["token,model", "by token and model"], ["model", "by model"], ["node", "by node"], ["day", "by day"], ["hour", "by hour"], ["token", "by token"]]),
      pick("days", route.query.get("days") || "", [["", "seven days"], ["1", "one day"], ["30", "thirty days"], ["365", "a year"]])),
    answer.usage.length ? table([
      ...names.map((name) => ({ name: name[0].toUpperCase() + name.slice(1), view: (one) => (name === "hour" ? words.absolute(words.seconds(one.hour)) : one[name] || "–") })),
      { name: "Requests", isNumber: true, view: (one) => one.requests.toLocaleString("en") },
      { name: "Errors", isNumber: true, view: (one) => h("span", { class: one.errors ? "bad" : "muted" }, one.errors.toLocaleString("en")) },
      { name: "Prompt tokens", isNumber: true, view: (one) => one.prompt_tokens.toLocaleString("en") },
      { name: "Answer tokens", isNumber: true, view: (one) => one.completion_tokens.toLocaleString("en") },
    ], answer.usage, { label: "Usage", key: (one) => names.map((name) => one[name]).join(" ") }) : empty("Nothing was used in this time."),
    answer.truncated && h("p", { class: "muted" }, "Only the first thousand rows are shown."),
  ];
}

function audit(list, { now, route }) {
  if (!list.length) return empty("Nothing was changed yet.");
  const search = (route.query.get("q") || "").toLowerCase();
  const shown = search ? list.filter((one) => [one.who, one.action, one.summary, one.target, one.path, one.address].some((text) => (text || "").toLowerCase().includes(search))) : list;
  return [
    h("div", { class: "filters" }, h("input", { type: "search", "data-search": true, "aria-label": "Search the audit", placeholder: "Search  ( / )", value: route.query.get("q") || "", oninput: (event) => { setQuery("q", event.target.value); changed(true); } })),
    table([
      { name: "When", view: (one) => age(words.seconds(one.at), now) },
      { name: "Who", view: (one) => [one.who || one.name, " ", h("small", null, one.role)] },
      { name: "What", isWide: true, view: (one) => [one.summary || one.action, " ", one.target && h("strong", null, one.target), h("br"), h("small", null, mono(`${one.method} ${one.path}`))] },
      { name: "Outcome", view: (one) => [h("span", { class: one.status < 400 ? "ok" : "bad" }, one.status < 400 ? "done" : "refused"), " ", h("small", null, one.status, " ", one.code || ""), one.operation_id && [" ", h("a", { href: `#/operations/${one.operation_id}` }, "operation")]] },
      { name: "From", view: (one) => mono(one.address || "–") },
    ], shown, { label: "Audit", key: (one) => one.id }),
    auditNext && h("div", { class: "buttons" }, h("button", { onclick: moreAudit }, "Show more")),
  ];
}

async function moreAudit() {
  await attempt(() => get(`/api/audit?limit=100&before=${encodeURIComponent(auditNext)}`), (answer) => {
    found.audit = [...found.audit, ...(answer.entries || answer.audit || [])];
    auditNext = answer.next || "";
  });
}
