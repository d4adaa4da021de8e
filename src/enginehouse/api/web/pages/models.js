// Models: what is served, how many replicas are wanted and there, and what else the galleries offer.

import { get, post } from "../client.js";
import { squares } from "../charts.js";
import { h } from "../dom.js";
import { changed } from "../live.js";
import { setQuery } from "../route.js";
import * as words from "../words.js";
import { addModel } from "../parts/add_model.js";
import { accepted, attempt } from "../parts/layers.js";
import { menuButton } from "../parts/menu.js";
import { empty, pill } from "../parts/marks.js";
import { loadProgress, modelActions, wantedOf } from "../parts/models.js";
import { windowed } from "../parts/windowed.js";

const ROW_PIXELS = 56;
let offers = null; // of the galleries of models; read when they are looked for

export const title = () => "Models";

export function enter() {
  if (offers === null)
    get("/models/available").then(
      (found) => {
        offers = found;
        changed();
      },
      () => {
        offers = [];
      },
    );
}

export function view(context) {
  const { state, route, canAct } = context;
  const search = (route.query.get("q") || "").toLowerCase();
  const every = [...state.models.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
  const served = every.filter((one) => one.state !== "available" && fits(one, search));
  const builtIn = every.filter((one) => one.state === "available" && fits(one, search));
  const more = (offers || []).filter((one) => !state.models.has(one.name) && fits(one, search));
  return [
    h(
      "div",
      { class: "head" },
      h("h1", null, sentence(every, state)),
      canAct &&
        h("div", { class: "buttons" }, h("button", { class: "main", onclick: () => addModel() }, "Add a model")),
    ),
    h(
      "div",
      { class: "filters" },
      h("input", {
        type: "search",
        "data-search": true,
        "aria-label": "Search models",
        placeholder: "Search by name or description  ( / )",
        value: route.query.get("q") || "",
        oninput: (event) => {
          setQuery("q", event.target.value);
          changed(true);
        },
      }),
    ),
    h(
      "section",
      null,
      h("h2", null, "Served"),
      served.length
        ? h(
            "div",
            { class: "rows" },
            served.map((one) => modelRow(one, context)),
          )
        : empty(
            search ? `No model matches “${search}”.` : "No model is served yet. Load one from below, or add your own.",
          ),
    ),
    builtIn.length > 0 &&
      h(
        "section",
        null,
        h("h2", null, "Ready to load"),
        h(
          "div",
          { class: "rows" },
          builtIn.map((one) => offeredRow(one, canAct)),
        ),
      ),
    more.length > 0 &&
      h(
        "section",
        null,
        h("h2", null, `More in the galleries (${words.grouped(more.length)})`),
        windowed("models of the galleries", more, ROW_PIXELS, (one) => galleryRow(one, canAct)),
      ),
  ];
}

const fits = (one, search) =>
  !search ||
  [one.name, one.description, one.backend, ...(one.tags || [])].some((text) =>
    (text || "").toLowerCase().includes(search),
  );

function sentence(every, state) {
  const served = every.filter((one) => one.state !== "available" && !one.removedAt);
  const ready = served.filter((one) => one.state === "loaded");
  const loading = served.filter((one) => one.state === "loading");
  const short = served.filter((one) => wantedOf(one, state) > (one.replicas || []).length && one.state !== "loading");
  if (!served.length) return state.isListed ? "No model is served yet." : "Reading the models…";
  const pieces = [
    `${ready.length} of ${words.count(served.length, "model")} ${ready.length === 1 ? "is" : "are"} ready.`,
  ];
  if (loading.length)
    pieces.push(`${words.names(loading.map((one) => one.name))} ${loading.length === 1 ? "is" : "are"} loading.`);
  if (short.length)
    pieces.push(
      `${words.names(short.map((one) => one.name))} ${short.length === 1 ? "has" : "have"} fewer replicas than wanted.`,
    );
  return pieces.join(" ");
}

function modelRow(model, context) {
  const { state, canAct } = context;
  const traffic = state.modelTraffic.get(model.name);
  const replicas = model.replicas || [];
  const where = [...new Set(replicas.map((one) => one.node_name))];
  return h(
    "article",
    {
      key: model.name,
      class: "modelrow",
      "data-row": true,
      tabindex: "0",
      onkeydown: (event) => {
        if (event.key === "Enter" && event.target === event.currentTarget) location.hash = address(model.name);
      },
    },
    h(
      "div",
      { class: "cell name" },
      h("a", { href: address(model.name) }, model.name),
      h("small", { class: "cut" }, ` ${model.backend}${model.size_bytes ? ` · ${words.bytes(model.size_bytes)}` : ""}`),
    ),
    h("div", { class: "cell" }, pill(words.modelMark(model))),
    h(
      "div",
      { class: "cell" },
      squares(replicas.length, wantedOf(model, state)),
      " ",
      h("span", { class: "muted" }, words.names(where)),
    ),
    h(
      "div",
      { class: "cell muted number" },
      traffic
        ? `${words.rate(traffic.requests_per_second)} req/s · ${traffic.time_to_first_token_seconds === null || traffic.time_to_first_token_seconds === undefined ? "–" : `${traffic.time_to_first_token_seconds.toFixed(2)} s`} to first token`
        : "",
    ),
    h(
      "div",
      { class: "cell buttons" },
      model.state === "loaded" &&
        canAct &&
        h("a", { class: "button", href: `#/chat?model=${encodeURIComponent(model.name)}` }, "Chat"),
      canAct && !model.removedAt && menuButton(`Actions for ${model.name}`, () => modelActions(model)),
    ),
    loadProgress(model, context),
  );
}

const address = (name) => `#/models/${encodeURIComponent(name)}`;

function offeredRow(model, canAct) {
  return h(
    "article",
    { key: model.name, class: "modelrow", "data-row": true, tabindex: "0" },
    h(
      "div",
      { class: "cell name" },
      h("a", { href: address(model.name) }, model.name),
      h("small", null, ` ${model.license} · ${words.bytes(model.size_bytes)}`),
    ),
    h("div", { class: "cell muted span" }, model.description),
    h(
      "div",
      { class: "cell buttons" },
      canAct &&
        h(
          "button",
          {
            "aria-label": `Load ${model.name}`,
            onclick: () =>
              attempt(
                () => post(`/api/models/${encodeURIComponent(model.name)}/load`),
                (made) => made.jobID && accepted(made, `${model.name} is being loaded.`),
              ),
          },
          "Load",
        ),
    ),
  );
}

function galleryRow(one, canAct) {
  return h(
    "div",
    { class: "offer", "data-row": true, tabindex: "0" },
    h(
      "div",
      { class: "text" },
      h(
        "div",
        null,
        h("strong", null, one.name),
        h("small", null, ` ${one.license || "licence unknown"} · ${(one.gallery && one.gallery.name) || ""}`),
      ),
      h("div", { class: "muted cut", title: one.description || undefined }, one.description || ""),
    ),
    canAct && h("button", { onclick: () => addModel({ entry: one }) }, "Plan…"),
  );
}
