// What the page knows of the cluster, and how one event changes it. Pure: no document, no network, no clock.
//
// Applying an event twice, or an older one after a newer one, changes nothing: operations count by `revision`, nodes by
// `updated_at`. What ended or was removed stays for a while, marked, so nothing vanishes under a person's eyes.

export const KEPT_ENDED = 50; // operations that have ended, of the page's own time

const FETCHING = new Set(["install_backend", "pull_model"]);
export const OPEN_ROWS = new Set(["queued", "downloading", "running_on_worker"]);

export function emptyState() {
  return {
    nodes: new Map(), // by id
    operations: new Map(), // by id; open ones and those that ended lately
    models: new Map(), // by name
    vitals: new Map(), // by id of a node: what every heartbeat changes
    traffic: null, // of the whole cluster; null while unknown
    modelTraffic: new Map(), // by name, while a model is used
    schedules: null, // by name of a model; null until read
    ahead: 0, // seconds that the server's clock is ahead of this one
    isListed: false, // whether the lists are here; before, nothing is known and nothing is called empty
    version: 0, // counts changes
  };
}

export const isEnded = (operation) => operation.status !== "queued" && operation.status !== "running";

/** Applies one event of the stream. Returns whether anything changed. */
export function apply(state, event, data, now) {
  state.version += 1;
  switch (event) {
    case "operation":
      return putOperation(state, data, now);
    case "node":
      return putNode(state, data);
    case "node-removed":
      return dropNode(state, data.id, now);
    case "model":
      return putModel(state, data);
    case "model-removed":
      return dropModel(state, data.name, now);
    case "pulse":
      return putPulse(state, data, now);
    case "caught-up":
    case "overflow":
      if (data.nodes) keepNodes(state, new Set(data.nodes), now);
      return true;
    default:
      return false;
  }
}

export function putOperation(state, found, now) {
  const known = state.operations.get(found.jobID);
  if (known && (known.revision || 0) > (found.revision || 0)) return false;
  const merged = followed(known, found);
  for (const row of merged.nodes || []) steady(row, known && known.byIntent && known.byIntent.get(row.intent), now);
  merged.byIntent = new Map((merged.nodes || []).map((row) => [row.intent, row]));
  merged.totals = totals(merged, known && known.totals);
  merged.rate = rateOf(known && known.rate, merged.totals.currentBytes, now);
  if (isEnded(merged) && (!known || !isEnded(known))) merged.endedHere = known ? now : 0;
  else if (known) merged.endedHere = known.endedHere;
  state.operations.set(merged.jobID, merged);
  trim(state);
  return true;
}

function followed(known, found) {
  if (!found.partial)
    return {
      ...found,
      nodes: found.nodes || (known && found.counts ? known.nodes : []),
      seenAt: known ? known.seenAt : undefined,
    };
  const before = known ? known.byIntent : new Map();
  const rows = new Map(before);
  for (const row of found.nodes || []) rows.set(row.intent, row);
  const nodes = [...rows.values()];
  // Rows that are replaced stay in their places.
  if (rows.size > before.size)
    nodes.sort((a, b) => (a.node_name < b.node_name ? -1 : a.node_name > b.node_name ? 1 : 0));
  const kept = known ? { targets: known.targets, excluded: known.excluded, asked: known.asked } : {};
  return { ...found, ...kept, nodes, partial: false };
}

/** Within an attempt, bytes and percent of a row never decrease, and its total stays what it was first. */
function steady(row, before, now) {
  if (!before || before === row || before.attempt !== row.attempt || row.status !== before.status) return;
  row.rate = rateOf(before.rate, row.current_bytes || 0, now);
  if (before.total_bytes && row.total_bytes && row.file_name === before.file_name) {
    row.current_bytes = Math.max(row.current_bytes || 0, before.current_bytes || 0);
  }
  row.percentage = Math.max(row.percentage || 0, before.percentage || 0);
}

/** Bytes over all nodes, and how many of a fixed number are done. Neither decreases while the operation runs. */
export function totals(operation, before) {
  const rows = operation.nodes || [];
  const counts = operation.counts || {};
  const count = Object.values(counts).reduce((sum, one) => sum + one, 0) || rows.length;
  const done = rows.length ? rows.filter((row) => row.status === "success").length : counts.success || 0;
  const failed = rows.length ? rows.filter((row) => row.status === "error").length : counts.error || 0;
  const total = operation.totalBytes || 0;
  const current = operation.currentBytes || 0;
  const isSame = before && !isEnded(operation);
  // Until every node has said how much it has to fetch, a sum of these would be a denominator that grows.
  const isWhole = rows.every((row) => !FETCHING.has(row.kind) || row.total_bytes || !OPEN_ROWS.has(row.status));
  return {
    count,
    done: isSame ? Math.max(done, before.done) : done,
    failed,
    totalBytes: isSame ? Math.max(total, before.totalBytes) : total,
    currentBytes: isSame ? Math.max(current, before.currentBytes) : current,
    isWhole: isWhole || Boolean(isSame && before.isWhole),
    percent: isSame ? Math.max(operation.progress || 0, before.percent) : operation.progress || 0,
  };
}

/** Bytes per second over the last seconds, so that the figure holds still. */
function rateOf(last, bytes, now) {
  if (!last) return { at: now, bytes, perSecond: 0 };
  const seconds = now - last.at;
  if (seconds < 1) return last;
  const measured = Math.max(0, bytes - last.bytes) / seconds;
  return { at: now, bytes, perSecond: last.perSecond ? 0.7 * last.perSecond + 0.3 * measured : measured };
}

function trim(state) {
  const ended = [...state.operations.values()].filter(isEnded);
  if (ended.length <= KEPT_ENDED) return;
  ended.sort((a, b) => (a.createdAt < b.createdAt ? -1 : 1));
  for (const one of ended.slice(0, ended.length - KEPT_ENDED)) state.operations.delete(one.jobID);
}

export function putNode(state, node) {
  const known = state.nodes.get(node.id);
  if (known && !known.removedAt && known.updated_at > node.updated_at) return false;
  state.nodes.set(node.id, node);
  return true;
}

function dropNode(state, id, now) {
  const known = state.nodes.get(id);
  if (!known || known.removedAt) return false;
  state.nodes.set(id, { ...known, removedAt: now });
  return true;
}

/** Removes for good what was removed longer than a moment ago. */
export function sweep(state, now, seconds = 5) {
  let changed = false;
  for (const map of [state.nodes, state.models]) {
    for (const [id, one] of map) {
      if (one.removedAt && now - one.removedAt > seconds) {
        map.delete(id);
        changed = true;
      }
    }
  }
  return changed;
}

function keepNodes(state, present, now) {
  for (const id of state.nodes.keys()) if (!present.has(id)) dropNode(state, id, now);
}

function putModel(state, model) {
  state.models.set(model.name, model);
  return true;
}

function dropModel(state, name, now) {
  const known = state.models.get(name);
  if (!known || known.removedAt) return false;
  state.models.set(name, { ...known, removedAt: now });
  return true;
}

function putPulse(state, pulse, now) {
  state.ahead = pulse.at - now;
  state.traffic = pulse.traffic || null;
  for (const [id, figures] of Object.entries(pulse.nodes || {})) state.vitals.set(id, figures);
  state.modelTraffic = new Map(Object.entries(pulse.models || {}));
  return true;
}

/** Replaces the lists, after a gap or at the beginning. */
export function putLists(state, { nodes, models, operations, schedules }, now) {
  if (nodes) {
    const present = new Set(nodes.map((node) => node.id));
    for (const node of nodes) putNode(state, node);
    keepNodes(state, present, now);
  }
  if (models) {
    const present = new Set(models.map((model) => model.name));
    for (const model of models) state.models.set(model.name, model);
    for (const [name, model] of state.models)
      if (!present.has(name) && !model.removedAt) state.models.set(name, { ...model, removedAt: now });
  }
  // A summary has no revision and no rows: what the stream said of an open operation counts before it.
  for (const one of operations || []) {
    const known = state.operations.get(one.jobID);
    if (!known || (isEnded(one) && !isEnded(known)))
      putOperation(state, { ...one, revision: known ? known.revision : 0 }, now);
  }
  if (schedules) state.schedules = new Map(schedules.map((one) => [one.model_name, one]));
  state.isListed ||= Boolean(nodes && models && operations);
  state.version += 1;
}
