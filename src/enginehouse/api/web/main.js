// READ FIRST. Who is here decides what is shown: the way in, or the shell with the page of the address.
//
// Pages are functions of the live state and of the address; each file under `pages/` has one or two. A page is
// `{view(context), enter?(context), leave?(), title}`; `context` has the route, the state, and what a person may do.

import { attention } from "./attention.js";
import { get, Refusal, whenSignedOut } from "./client.js";
import { stop as stopAnswer } from "./conversation.js";
import { forgetUnused, h, render } from "./dom.js";
import * as keys from "./keys.js";
import * as live from "./live.js";
import { current } from "./route.js";
import { loadAll, pageOf } from "./pages/table.js";
import * as login from "./pages/login.js";
import { clear, closeAll, complain, layers } from "./parts/layers.js";
import { foldPages, shell } from "./parts/shell.js";

const app = document.getElementById("app");
const session = { name: "", role: "", version: "", frontend: "" };
const AGAIN_MS = 3_000; // until a server that does not answer yet is asked again
let isHere = false; // whether a session is known
let wasHere = false; // whether one was, and has ended
let again = 0;
let hasOthers = false; // whether the modules of all pages were asked for
let shown = null; // the page that was entered
let shownAt = "";

export async function start() {
  pageOf(current()); // its modules come while the session is asked for
  whenSignedOut(leave);
  window.addEventListener("hashchange", arrive);
  window.addEventListener("focus", lookAgain);
  document.addEventListener("visibilitychange", lookAgain);
  live.subscribe(draw);
  keys.listen(() => isHere);
  const failure = await useLink();
  await enter();
  if (failure && isHere) complain(failure);
}

/** Uses the login link of the address, if it is one. Returns why it was refused, if it was. */
async function useLink() {
  const { page, parts } = current();
  return page === "login" && parts[0] ? login.useCode(parts[0]) : null;
}

/** Another address. A login link pasted into a tab that shows the page does not load it anew, so it is used here. */
async function arrive() {
  foldPages();
  closeAll(); // what lies over a page belongs to that page
  if (current().page === "login") {
    const failure = await useLink();
    if (failure === undefined)
      location.reload(); // nothing of whom it was for before is left
    else if (failure && isHere) complain(failure);
  }
  live.changed(true);
}

/** Somebody looks: perhaps they have signed in with another tab meanwhile. */
function lookAgain() {
  if (!isHere && !document.hidden) enter();
  else live.changed(true);
}

/** Begins with the session that the browser has; shows the way in if it has none. */
export async function enter() {
  clearTimeout(again);
  try {
    Object.assign(session, await get("/api/session"));
    // What the person before has said, typed and opened is not for the next one.
    if (wasHere) location.reload();
    isHere = true;
    live.start();
  } catch (error) {
    isHere = false;
    if (!(error instanceof Refusal && error.status === 401)) {
      login.failed(error.message);
      if (!error.status || error.status >= 500) again = setTimeout(enter, AGAIN_MS);
    }
  }
  draw();
}

function leave() {
  if (!isHere) return;
  isHere = false;
  wasHere = true;
  live.stop();
  stopAnswer();
  clear();
  login.failed("You have been signed out, or the session has expired.");
  draw();
}

function context() {
  const now = live.now();
  return {
    route: current(),
    state: live.state,
    needs: isHere ? attention(live.state, now) : [],
    connection: live.connection,
    now,
    session,
    canAct: session.role === "admin",
    refresh: () => live.changed(true),
    signOut: leave,
  };
}

function draw() {
  const here = context();
  if (!isHere) {
    show(null, "", here);
    document.title = "Enginehouse";
    render(app, login.view({ ...here, enter }));
  } else {
    const page = pageOf(here.route);
    show(page, `${here.route.page}/${here.route.parts.join("/")}`, here);
    document.title = `${page.title(here)} · Enginehouse`;
    render(app, shell(here, shownSafely(here, page)));
  }
  render(document.getElementById("layers"), layers(here));
  forgetUnused();
  // The first page is there, so the others may come.
  if (isHere && here.state.isListed && !hasOthers) {
    hasOthers = true;
    requestAnimationFrame(() => setTimeout(loadAll));
  }
}

/** A page that fails says so; the others, and what lies around it, go on. */
function shownSafely(here, page) {
  if (here.connection.status === "refused" && !here.state.isListed) {
    return h("p", { class: "note bad", role: "alert" }, here.connection.error);
  }
  try {
    return page.view(here);
  } catch (error) {
    console.error(error);
    return h(
      "p",
      { class: "note bad", role: "alert" },
      `This page cannot be shown: ${error.message}. Please report it.`,
    );
  }
}

/** Tells a page that it is entered or left; another address of the same page is another visit. */
function show(page, address, here) {
  if (address === shownAt && page === shown) return;
  const [before, from] = [shown, shownAt];
  shown = page;
  shownAt = address;
  if (before && before.leave) before.leave();
  if (page && page.enter) page.enter({ ...here, cameFrom: before && before.enter ? from : "" });
  if (page) requestAnimationFrame(() => window.scrollTo(0, 0));
}

start();
