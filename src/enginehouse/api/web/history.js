// Figures of the last hour, read once when a page wants them and then grown by every pulse: nothing is asked again.

import { get } from "./client.js";
import { changed, state, subscribe } from "./live.js";

const POINTS = 360;
const AGAIN_MS = 5_000; // until it is asked again after a failure
let found = null; // {step_seconds, ends_at, series, nodes}
let wanted = 0;
let grownTo = 0;
let isReading = false;
let again = 0;

export const known = () => found;

export function want() {
  wanted += 1;
  if (!found && state.isListed) read();
}

export function unwant() {
  wanted = Math.max(0, wanted - 1);
}

async function read() {
  if (isReading || Date.now() < again) return;
  isReading = true;
  try {
    found = await get("/api/history");
    grownTo = found.ends_at;
  } catch {
    found = null; // drawn as unknown; the stream says that the connection is lost
    again = Date.now() + AGAIN_MS;
  } finally {
    isReading = false;
    changed();
  }
}

subscribe(() => {
  // After the lists, which are looked at first.
  if (!found && wanted && state.isListed) read();
  if (!found || !state.traffic) return;
  const at = Date.now() / 1000 + state.ahead;
  if (at - grownTo > 6 * found.step_seconds) {
    // A gap: what happened meanwhile is on the server.
    grownTo = at;
    if (wanted) read();
    else found = null;
    return;
  }
  if (at - grownTo < found.step_seconds) return;
  grownTo += found.step_seconds;
  const grow = (values, value) => [
    ...values.slice(values.length >= POINTS ? 1 : 0),
    value === undefined ? null : value,
  ];
  // What is new has no figures of the time before it.
  const blank = new Array(found.series.requests_per_second.length).fill(null);
  const series = {};
  for (const [name, values] of Object.entries(found.series)) series[name] = grow(values, state.traffic[name]);
  const nodes = {};
  for (const id of new Set([...Object.keys(found.nodes || {}), ...state.nodes.keys()]))
    nodes[id] = grownNode(id, (found.nodes || {})[id] || {}, blank, grow);
  const models = {};
  for (const name of new Set([...Object.keys(found.models || {}), ...state.modelTraffic.keys()]))
    models[name] = grownModel(name, (found.models || {})[name] || {}, blank, grow);
  found = { ...found, series, nodes, models, ends_at: grownTo };
});

function grownNode(id, lines, blank, grow) {
  const node = state.nodes.get(id);
  const vitals = state.vitals.get(id) || {};
  const isHeard = node && node.health === "healthy";
  const used = (total, free) => (isHeard && total && free !== undefined && free !== null ? total - free : null);
  return {
    used_ram: grow(lines.used_ram || blank, node && used(node.total_ram, vitals.available_ram)),
    used_vram: grow(lines.used_vram || blank, node && used(node.total_vram, vitals.available_vram)),
    used_cores: grow(lines.used_cores || blank, isHeard ? vitals.used_cores : null),
  };
}

function grownModel(name, lines, blank, grow) {
  const now = state.modelTraffic.get(name) || { requests_per_second: 0 };
  const grown = {};
  for (const each of new Set([...Object.keys(lines), "requests_per_second", "time_to_first_token_seconds"]))
    grown[each] = grow(lines[each] || blank, now[each]);
  return grown;
}

/** The lines of a node over the hour. The same object while nothing was added. */
export const linesOf = (id) => (found && found.nodes && found.nodes[id]) || null;
