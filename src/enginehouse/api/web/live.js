// The one live source: the event stream, its state, and who is told of changes. Nothing here polls while the stream works.
//
// The stream begins before the lists are read, so nothing is lost between; after a gap it resumes by the id of the last
// event, on any frontend. Silence longer than the server's sign of life means that the connection is dead.

import { get, readEvents, Refusal, send } from "./client.js";
import { apply, emptyState, putLists, sweep } from "./state.js";

const SILENCE_MS = 12_000; // the server sends a sign of life every five seconds
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 8_000;
const DRAWN_EVERY_MS = 333; // faster updates of numbers cannot be read
const LISTED_AGAIN_MS = 2_000;
const SHARE = 5; // of a drawing's time, until the next one
const LISTED = 50; // operations of the first list
const LIST_MS = 20_000; // an answer that is later belongs to a connection that is gone
const ALL = ["nodes", "models", "operations", "schedules"];

export const state = emptyState();
export const connection = { status: "connecting", heardAt: 0, error: "" };

const listeners = new Set();
let stopping = null;
let lastId = "";
let drawing = 0;
let drawnAt = 0;
let tookMs = 0;
let isGreeted = false; // whether the present stream has brought anything
let listing = 0; // the timer of the next attempt
const missing = new Set(); // lists that could not be read

const STALE_MS = 8_000; // the server sends a sign of life every five seconds

/** Whether what is shown is so now. */
export const isFresh = ({ status, heardAt }) => status === "live" && Date.now() - 1000 * heardAt < STALE_MS;

/** The server's clock as it is now, in seconds. */
export const now = () => Date.now() / 1000 + state.ahead;

/** Calls `listener` after changes, at most a few times a second. Returns the function that ends this. */
export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Draws soon: at once for what a person did, and seldom enough for a flood of events. */
export function changed(isByPerson = false) {
  if (drawing && !isByPerson) return;
  // What takes long to draw is drawn more seldom, so most of the time is left for the person.
  const pause = Math.max(DRAWN_EVERY_MS, SHARE * tookMs);
  const rest = isByPerson ? 0 : Math.max(0, drawnAt + pause - performance.now());
  clearTimeout(drawing);
  drawing = setTimeout(() => requestAnimationFrame(draw), rest);
  // A page in the background gets no animation frames; it is drawn when it is looked at.
}

function draw() {
  drawing = 0;
  const began = performance.now();
  for (const listener of listeners) listener();
  drawnAt = performance.now();
  tookMs = drawnAt - began;
}

export function start() {
  if (stopping) return;
  stopping = new AbortController();
  follow(stopping.signal);
  const ticking = setInterval(tick, 1000);
  stopping.signal.addEventListener("abort", () => clearInterval(ticking));
}

export function stop() {
  if (stopping) stopping.abort();
  stopping = null;
  lastId = "";
  Object.assign(state, emptyState());
  Object.assign(connection, { status: "connecting", heardAt: 0, error: "" });
}

/** Ages are shown, so something changes every second. */
function tick() {
  sweep(state, Date.now() / 1000);
  if (!document.hidden) changed();
}

async function follow(signal) {
  let pause = FIRST_PAUSE_MS;
  while (!signal.aborted) {
    const began = Date.now();
    isGreeted = false;
    try {
      await read(signal);
    } catch (error) {
      if (signal.aborted) return;
      connection.error = error instanceof Refusal ? error.message : "";
      if (error instanceof Refusal && (error.status === 401 || error.status === 403)) {
        connection.status = "refused";
        changed();
        return;
      }
    }
    if (signal.aborted) return;
    if (isGreeted && Date.now() - began > 5_000) pause = FIRST_PAUSE_MS;
    connection.status = "reconnecting";
    // A server that answers and whose stream does not come through: something between holds it back, so it is asked.
    if (!isGreeted && began + SILENCE_MS <= Date.now()) await list(ALL);
    changed();
    await rest(pause * (0.75 + Math.random() / 2), signal);
    pause = Math.min(LONGEST_PAUSE_MS, 2 * pause);
  }
}

function rest(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(done, milliseconds);
    function done() {
      clearTimeout(timer);
      window.removeEventListener("online", done);
      resolve();
    }
    window.addEventListener("online", done, { once: true });
    signal.addEventListener("abort", done, { once: true });
  });
}

async function read(signal) {
  const attempt = new AbortController();
  const abort = () => attempt.abort();
  signal.addEventListener("abort", abort);
  let watchdog = setTimeout(abort, SILENCE_MS);
  try {
    const headers = lastId ? { "last-event-id": lastId } : {};
    const isResumed = Boolean(lastId);
    const answer = await send("GET", "/api/events", undefined, { headers, signal: attempt.signal });
    for await (const event of readEvents(answer)) {
      clearTimeout(watchdog);
      watchdog = setTimeout(abort, SILENCE_MS);
      connection.heardAt = Date.now() / 1000;
      if (event.id) lastId = event.id;
      if (event.event === "hello") {
        isGreeted = true;
        connection.status = "live";
        connection.error = "";
        // What a resumed stream missed it sends itself; of models it has no list of the present ones.
        list(isResumed && state.isListed ? ["models", "schedules", ...missing] : ALL);
      } else if (event.event === "bye") {
        return;
      } else if (event.event) {
        apply(state, event.event, JSON.parse(event.data), Date.now() / 1000);
        // Why a wanted model is not there is no part of the stream.
        if (event.event === "model" || event.data.includes('"kind":"load"')) listSoon("schedules");
        if (event.event === "overflow") list(ALL);
      }
      changed();
    }
  } finally {
    clearTimeout(watchdog);
    signal.removeEventListener("abort", abort);
    attempt.abort();
  }
}

let soon = 0;

/** Reads one list again in a moment, once for many changes. */
function listSoon(name) {
  if (!soon) {
    soon = setTimeout(() => {
      soon = 0;
      if (stopping) list([name]);
    }, LISTED_AGAIN_MS);
  }
}

const PATHS = {
  nodes: "/api/nodes",
  models: "/api/models",
  operations: `/api/operations?all=true&rows=false&limit=${LISTED}`,
  schedules: "/api/nodes/scheduling",
};
const PART = { operations: (answer) => (Array.isArray(answer) ? answer : answer.operations || []) };

/** Reads lists again. One that fails is read again a moment later, or with the next connection. */
export async function list(names) {
  const wanted = [...new Set(names)];
  const signal = AbortSignal.timeout(LIST_MS);
  const found = await Promise.all(wanted.map((one) => get(PATHS[one], { signal }).catch(() => null)));
  if (!stopping) return;
  const lists = {};
  wanted.forEach((one, at) => {
    if (found[at] === null) missing.add(one);
    else {
      missing.delete(one);
      lists[one] = PART[one] ? PART[one](found[at]) : found[at];
    }
  });
  putLists(state, lists, Date.now() / 1000);
  if (!isGreeted && !missing.size) connection.heardAt = Date.now() / 1000;
  changed(true); // a person waits for the first lists, and they are rare
  clearTimeout(listing);
  if (missing.size) listing = setTimeout(() => connection.status === "live" && list(missing), FIRST_PAUSE_MS * 4);
}
