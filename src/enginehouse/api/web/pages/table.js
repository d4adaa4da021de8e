// Every page by the first part of its address.

import { h } from "../dom.js";
import * as access from "./access.js";
import * as backends from "./backends.js";
import * as chat from "./chat.js";
import * as fleet from "./fleet.js";
import * as logs from "./logs.js";
import * as model from "./model.js";
import * as models from "./models.js";
import * as node from "./node.js";
import * as operations from "./operations.js";
import * as operation from "./operation.js";
import * as settings from "./settings.js";

const missing = {
  title: () => "Not found",
  view: ({ route }) =>
    h(
      "div",
      { class: "empty" },
      h("p", null, `There is no page ${route.text}.`),
      h("a", { href: "#/fleet" }, "Go to the fleet"),
    ),
};

/** A page of one object, where the address names one, else the page of all. */
const either = (all, one) => ({
  title: (context) => (context.route.parts.length ? one : all).title(context),
  view: (context) => (context.route.parts.length ? one : all).view(context),
  enter: (context) => {
    const page = context.route.parts.length ? one : all;
    if (page.enter) page.enter(context);
  },
  leave: () => {
    for (const page of [all, one]) if (page.leave) page.leave();
  },
});

const WIDE_PIXELS = 1900; // from here on the list stays beside the operation that was opened from it

const isBeside = ({ route }) => route.parts.length > 0 && window.innerWidth >= WIDE_PIXELS;
const one = either(operations, operation);
const operationsAndOne = {
  title: one.title,
  view: (context) =>
    isBeside(context)
      ? h(
          "div",
          { class: "besides" },
          h("aside", { "aria-label": "Operations" }, operations.view(context, { isAside: true })),
          h("div", { class: "one" }, operation.view(context)),
        )
      : one.view(context),
  enter: (context) => {
    if (isBeside(context)) operations.enter(context);
    one.enter(context);
  },
  leave: one.leave,
};

export const pages = {
  fleet,
  nodes: either(fleet, node),
  operations: operationsAndOne,
  backends,
  models: either(models, model),
  chat,
  logs,
  access,
  settings,
  login: fleet,
  missing,
};
