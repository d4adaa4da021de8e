// What needs a person, most urgent first, each with the one thing that helps. Pure. An empty list means that nothing does.

import { isEnded } from "./state.js";
import * as words from "./words.js";

const ARRIVING_SECONDS = 60;
const FULL_DISK = 0.05; // of the disk that is free
const LEAST_DISK_BYTES = 512 * 1024 ** 2; // below this an install soon fails, however small the disk is

/** `{key, kind, colour, text, link?, action?: {label, name, …}}` per matter. */
export function attention(state, now) {
  const found = [];
  const pending = [];
  const waiting = waitingRequests(state);
  const unplaced = unplacedModels(state);
  for (const node of state.nodes.values()) {
    if (node.removedAt) continue;
    if (!node.approved) {
      pending.push(node);
      continue;
    }
    const free = figure(state, node, "available_disk");
    if (node.total_disk && free !== null && free < littleDisk(node) && node.health !== "offline") {
      found.push({
        key: `disk ${node.id}`,
        kind: "disk",
        colour: "bad",
        link: `#/nodes/${encodeURIComponent(node.name)}`,
        text: `${node.name} has ${words.bytes(free)} of ${words.bytes(node.total_disk)} disk free. Delete what it no longer needs.`,
      });
    }
    for (const failed of node.failed_replicas || []) {
      found.push({
        key: `replica ${node.id} ${failed.model_id}#${failed.replica_index}`,
        kind: "replica",
        colour: "bad",
        link: `#/logs/${encodeURIComponent(node.name)}/${encodeURIComponent(failed.model_id)}`,
        text: `${failed.model_id} does not stay up on ${node.name}: ${failed.message}`,
        action: { name: "link", label: "Show its log" },
      });
    }
    if (node.health === "offline" && !isArriving(state, node, now)) {
      const many = waiting.get(node.id) || 0;
      found.push({
        key: `away ${node.id}`,
        kind: "away",
        colour: "warn",
        link: `#/nodes/${encodeURIComponent(node.name)}`,
        text: `${node.name} has been offline for ${words.span(now - heardAt(state, node))}${many ? `; ${words.count(many, "request")} ${many === 1 ? "waits" : "wait"} for it` : ""}.`,
      });
    } else if (node.degraded) {
      found.push({
        key: `degraded ${node.id}`,
        kind: "degraded",
        colour: "warn",
        link: `#/nodes/${encodeURIComponent(node.name)}`,
        text: `${node.name} sends heartbeats, but commands do not reach it. Check that it reaches the port of NATS.`,
      });
    } else if (node.health === "unhealthy") {
      found.push({
        key: `late ${node.id}`,
        kind: "late",
        colour: "warn",
        link: `#/nodes/${encodeURIComponent(node.name)}`,
        text: `${node.name} is unhealthy: its heartbeats come late. Check its load and its network.`,
      });
    }
  }
  for (const operation of state.operations.values()) {
    if (operation.dismissed || !isEnded(operation) || !["failed", "partial"].includes(operation.status)) continue;
    if (isSettled(state, operation) || (operation.kind === "load" && unplaced.has(operation.name))) continue;
    found.push({
      key: `operation ${operation.jobID}`,
      kind: "failed",
      colour: operation.status === "partial" ? "warn" : "bad",
      link: `#/operations/${operation.jobID}`,
      operation,
      text: failure(state, operation),
      action: { name: "retry", label: "Retry" },
    });
  }
  for (const [name, reason] of unplaced) {
    found.push({
      key: `unplaced ${name}`,
      kind: "unplaced",
      colour: "bad",
      link: `#/models/${encodeURIComponent(name)}`,
      text: `${name} cannot be ${reason}`,
      action: { name: "link", label: "Explain" },
    });
  }
  pending.sort((a, b) => (a.name < b.name ? -1 : 1));
  const joins = pending.map((node) => ({
    key: `pending ${node.id}`,
    kind: "pending",
    colour: "warn",
    node,
    text: node.waits_for ? `${node.name} asks to join again: ${node.waits_for}` : `${node.name} asks to join`,
    action: { name: "approve", label: "Approve" },
  }));
  const order = { replica: 0, disk: 1, failed: 2, unplaced: 3, degraded: 4, late: 5, away: 6 };
  found.sort((a, b) => order[a.kind] - order[b.kind] || (a.key < b.key ? -1 : 1));
  return [...joins, ...found];
}

/** Below how many free bytes a disk needs a person. */
const littleDisk = (node) => Math.max(LEAST_DISK_BYTES, FULL_DISK * node.total_disk);

/** The wanted models that are not where they should be: "placed: …", or "loaded: …" where a load failed. */
function unplacedModels(state) {
  const found = new Map();
  for (const [name, one] of [...(state.schedules || [])].sort()) {
    const isPlace = (one.reason || "").startsWith(`cannot place ${name}: `);
    const reason = isPlace ? one.reason.slice(`cannot place ${name}: `.length) : one.reason;
    if (reason) found.set(name, `${isPlace ? "placed" : "loaded"}: ${reason}`);
  }
  return found;
}

/** A figure of a node as it was last heard; null if unknown. */
export function figure(state, node, name) {
  const vitals = state.vitals.get(node.id);
  const value = vitals && vitals[name] !== undefined ? vitals[name] : node[name];
  return value === undefined ? null : value;
}

export function heardAt(state, node) {
  const vitals = state.vitals.get(node.id);
  return Math.max(vitals ? vitals.heard_at : 0, words.seconds(node.last_heartbeat));
}

/** Whether a machine that was just approved may still be on its way: it asks again after a pause. */
export const isArriving = (state, node, now) => words.isNew(node) && now - heardAt(state, node) < ARRIVING_SECONDS;

export const nameOf = (state) => (id) => (state.nodes.get(id) || {}).name || id;

/** How many requests wait for each node, by its id. */
export function waitingRequests(state) {
  const counts = new Map();
  for (const operation of state.operations.values()) {
    if (isEnded(operation)) continue;
    for (const row of operation.nodes || []) {
      if (row.reason === "node_away" || row.reason === "draining")
        counts.set(row.node_id, (counts.get(row.node_id) || 0) + 1);
    }
  }
  return counts;
}

/** Whether a later request has done what this one could not: a retry, the same again, or a model that runs by now. */
function isSettled(state, operation) {
  if (operation.kind === "load" && ((state.models.get(operation.name) || {}).replicas || []).length) return true;
  for (const other of state.operations.values()) {
    if (other.retryOf === operation.jobID) return true;
    const isSame =
      other.kind === operation.kind && other.name === operation.name && other.createdAt > operation.createdAt;
    if (isSame && other.status === "succeeded") return true;
  }
  return false;
}

/** The sentence about a failed operation, with what one of its nodes said. */
function failure(state, operation) {
  const sentence = words.operationSentence(operation, nameOf(state));
  const failed = (operation.nodes || []).find((row) => row.status === "error" && row.error);
  const why = failed ? `${failed.node_name}: ${failed.error}` : operation.error || "";
  if (!why || sentence.includes(why)) return sentence;
  return `${sentence} ${why.length > 240 ? `${why.slice(0, 240)}…` : why}`;
}

/** The first line of every page: what is so, in words. */
export function truth(state) {
  const nodes = [...state.nodes.values()].filter((node) => node.approved && !node.removedAt);
  const healthy = nodes.filter((node) => node.health === "healthy" && !node.drained).length;
  const replicas = [...state.models.values()].reduce((sum, model) => sum + (model.replicas || []).length, 0);
  const running = [...state.operations.values()].filter((one) => !isEnded(one)).length;
  const traffic = state.traffic;
  return {
    healthy,
    nodes: nodes.length,
    pieces: [
      nodes.length
        ? `${healthy} of ${words.count(nodes.length, "node")} healthy`
        : state.isListed
          ? "no nodes yet"
          : "reading the fleet",
      state.isListed ? words.count(replicas, "replica") : "– replicas",
      `${words.rate(traffic && traffic.requests_per_second)} req/s`,
      `${words.rate(traffic && traffic.tokens_per_second)} tok/s`,
      ...(running ? [`${words.count(running, "operation")} running`] : []),
    ],
  };
}
