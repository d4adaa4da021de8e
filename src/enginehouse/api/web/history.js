// Figures of the last hour, read once when a page wants them and then grown by every pulse: nothing is asked again.

import { get } from "./client.js";
import { changed, state, subscribe } from "./live.js";

const POINTS = 360;
let found = null; // {step_seconds, ends_at, series, nodes}
let wanted = 0;
let grownTo = 0;
let isReading = false;

export const known = () => found;

export function want() {
  wanted += 1;
  if (!found) read();
}

export function unwant() {
  wanted = Math.max(0, wanted - 1);
}

async function read() {
  if (isReading) return;
  isReading = true;
  try {
    found = await get("/api/history");
    grownTo = found.ends_at;
  } catch {
    found = null; // drawn as unknown; the stream says that the connection is lost
  } finally {
    isReading = false;
    changed();
  }
}

subscribe(() => {
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
  const series = {};
  for (const [name, values] of Object.entries(found.series)) series[name] = grow(values, state.traffic[name]);
  const nodes = {};
  for (const [id, lines] of Object.entries(found.nodes || {})) nodes[id] = grownNode(id, lines, grow);
  found = { ...found, series, nodes, ends_at: grownTo };
});

function grownNode(id, lines, grow) {
  const node = state.nodes.get(id);
  const vitals = state.vitals.get(id) || {};
  const isHeard = node && node.health === "healthy";
  const used = (total, free) => (isHeard && total && free !== undefined && free !== null ? total - free : null);
  return {
    used_ram: grow(lines.used_ram || [], node && used(node.total_ram, vitals.available_ram)),
    used_vram: grow(lines.used_vram || [], node && used(node.total_vram, vitals.available_vram)),
    used_cores: grow(lines.used_cores || [], isHeard ? vitals.used_cores : null),
  };
}

/** The memory of a node over the hour: of its graphics cards if it has any. The same list while nothing was added. */
export function ofNode(id) {
  const lines = found && found.nodes && found.nodes[id];
  if (!lines) return null;
  const isKnown = (values) => values && values.some((value) => value !== null);
  return isKnown(lines.used_vram) ? lines.used_vram : isKnown(lines.used_ram) ? lines.used_ram : null;
}

export const linesOf = (id) => (found && found.nodes && found.nodes[id]) || null;
