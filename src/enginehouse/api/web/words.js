// How the page says things: states as a mark and a word, numbers that hold still, times, and the sentences of each page.
// Pure. The same words are used by `enginehouse top`.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** Bytes in binary units with one decimal. Unknown stays unknown. */
export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let at = 0;
  let value = count;
  while (value >= 1024 && at < UNITS.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${at === 0 ? value : value.toFixed(1)} ${UNITS[at]}`;
}

/** Two amounts in the unit of the larger one: "1.2 of 3.1 GiB". */
export function bytesOf(current, total) {
  if (!total) return current ? bytes(current) : "";
  let at = 0;
  let scale = 1;
  while (total / scale >= 1024 && at < UNITS.length - 1) {
    scale *= 1024;
    at += 1;
  }
  const shown = (count) => (at === 0 ? String(count) : (count / scale).toFixed(1));
  return `${shown(current || 0)} of ${shown(total)} ${UNITS[at]}`;
}

export function count(number, noun, plural = `${noun}s`) {
  return `${grouped(number)} ${number === 1 ? noun : plural}`;
}

/** A whole number with its thousands apart. Without the browser's own formats: making the first takes 30 ms. */
export const grouped = (number) => String(number).replace(/\B(?=(\d{3})+$)/g, ",");

/** A rate with as many digits as mean something. */
export function rate(perSecond) {
  if (perSecond === null || perSecond === undefined) return "–";
  return perSecond >= 100 ? perSecond.toFixed(0) : perSecond.toFixed(1);
}

/** A time span in one unit, or two from an hour on. */
export function span(seconds) {
  if (seconds === null || seconds === undefined || !isFinite(seconds)) return "–";
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d`;
}

/** Time left, as a clock. */
export function clock(seconds) {
  if (!isFinite(seconds) || seconds < 0) return "";
  const whole = Math.ceil(seconds);
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor((whole % 3600) / 60);
  const rest = String(whole % 60).padStart(2, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}

export const seconds = (text) => (text ? Date.parse(text) / 1000 : 0);

export function ago(at, now) {
  return at ? `${span(now - at)} ago` : "never";
}

const two = (number) => String(number).padStart(2, "0");

/** The time of day here. */
export function time(at) {
  const date = new Date(at * 1000);
  return at ? `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}` : "";
}

/** Day and time here, which every reader understands. */
export function absolute(at) {
  const date = new Date(at * 1000);
  return at ? `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${time(at)}` : "";
}

// Marks: [shape, word, colour]. The shape and the word say it without the colour.
const ROWS = {
  queued: ["○", "Queued", "idle"],
  downloading: ["◐", "Downloading", "info"],
  installing: ["◑", "Installing", "info"],
  starting: ["◑", "Starting", "info"],
  loading: ["◑", "Loading", "info"],
  working: ["◑", "Working", "info"],
  running_on_worker: ["◔", "Worker busy", "warn"],
  success: ["●", "Done", "ok"],
  error: ["✕", "Failed", "bad"],
  partial: ["◪", "Partly", "warn"],
  skipped: ["–", "Skipped", "idle"],
  cancelled: ["⊘", "Cancelled", "idle"],
  superseded: ["⊘", "Superseded", "idle"],
};
const PHASES = {
  downloading: "downloading",
  resolving: "downloading",
  extracting: "installing",
  starting: "starting",
  loading: "loading",
};

/** The mark of one node in an operation. */
export function rowMark(row) {
  if (row.status === "downloading") {
    const files = row.kind === "install" || row.kind === "pull_model" || row.kind === "upgrade" || row.file_name;
    return ROWS[PHASES[row.phase] || (files ? "installing" : "working")];
  }
  return ROWS[row.status] || ["○", row.status, "idle"];
}

const OPERATIONS = {
  queued: ["○", "Queued", "idle"],
  running: ["◐", "Running", "info"],
  succeeded: ["●", "Done", "ok"],
  partial: ["◪", "Partly", "warn"],
  failed: ["✕", "Failed", "bad"],
  cancelled: ["⊘", "Cancelled", "idle"],
  superseded: ["⊘", "Superseded", "idle"],
};

export function operationMark(operation) {
  if (operation.isParked && !OPERATIONS[operation.status]?.[1].match(/Done|Failed|Partly/))
    return ["◌", "Waiting for nodes", "idle"];
  return OPERATIONS[operation.status] || ["○", operation.status, "idle"];
}

const NODES = {
  healthy: ["●", "healthy", "ok"],
  unhealthy: ["◔", "unhealthy", "warn"],
  offline: ["◌", "offline", "bad"],
  pending: ["○", "asks to join", "warn"],
  draining: ["◒", "drained", "idle"],
};

/** Whether a machine of ours was approved and has not reported since; one of LocalAI's has no fingerprint. */
export const isNew = (node) =>
  Boolean(node.approved && node.health === "offline" && node.fingerprint && !node.worker_version);

export function nodeMark(node) {
  if (node.removedAt) return ["⊘", "removed", "idle"];
  if (isNew(node)) return ["○", "approved, not connected yet", "idle"];
  if (node.approved && node.degraded) return ["◔", "no commands reach it", "warn"];
  if (node.approved && node.drained && node.health !== "healthy") return ["◌", `drained, ${node.health}`, "idle"];
  return NODES[node.status] || ["○", node.status, "idle"];
}

const MODELS = {
  available: ["–", "in the gallery", "idle"],
  added: ["○", "not running", "idle"],
  loading: ["◑", "loading", "info"],
  loaded: ["●", "ready", "ok"],
};

export function modelMark(model) {
  if (model.removedAt) return ["⊘", "deleted", "idle"];
  return MODELS[model.state] || ["○", model.state, "idle"];
}

const KINDS = {
  install: "Install",
  upgrade: "Upgrade",
  delete: "Delete",
  rollback: "Roll back",
  load: "Load",
  unload: "Unload",
  delete_model: "Delete the model",
  drain: "Drain",
};

/** What an operation is, in words: "Upgrade llama-cpp". */
export function title(operation, nodeName = (id) => id) {
  const kind = KINDS[operation.kind] || operation.kind;
  const name = operation.kind === "drain" ? nodeName(operation.name) : operation.name;
  return `${kind} ${name}`;
}

/** "2 of 5 nodes"; the denominator is fixed when the operation is created. A load has several steps on one node. */
export function doneOf(operation) {
  const { done, count: total } = operation.totals;
  return `${done} of ${count(total, operation.kind === "load" ? "step" : "node")}`;
}

/** How much of an operation was fetched: of a total only when that is known of every node. */
export function amountOf(operation) {
  const { totalBytes, currentBytes, isWhole } = operation.totals;
  if (isWhole) return bytesOf(currentBytes, totalBytes);
  return currentBytes ? `${bytes(currentBytes)} so far` : "";
}

/** The present rate of an operation or of one of its rows; "" while nothing moves. */
export function rateText(one, isMoving) {
  return isMoving && one.rate && one.rate.perSecond > 1 ? `${bytes(one.rate.perSecond)}/s` : "";
}

/** The time that is left at the present rate; "" where nothing is known of it. */
export function timeLeft(operation) {
  const { totalBytes, currentBytes, isWhole } = operation.totals;
  const perSecond = operation.rate ? operation.rate.perSecond : 0;
  if (!isWhole || !totalBytes || !perSecond || currentBytes >= totalBytes) return "";
  return `${clock((totalBytes - currentBytes) / perSecond)} left`;
}

/** The header of an operation: how it stands, in one sentence. */
export function operationSentence(operation, nodeName) {
  const counts = operation.counts || {};
  const rows = operation.nodes || [];
  const pieces = [];
  const { count: total, done } = operation.totals;
  if (total === 0)
    return `${title(operation, nodeName)}: ${operation.error || operationMark(operation)[1].toLowerCase()}.`;
  pieces.push(`${done} of ${total} done`);
  const failed = counts.error || 0;
  if (failed) pieces.push(`${failed} failed`);
  const away = rows.filter((row) => row.reason === "node_away");
  if (away.length === 1) pieces.push(`1 waits for ${away[0].node_name}`);
  else if (away.length) pieces.push(`${away.length} wait for their nodes`);
  const queued = (counts.queued || 0) - away.length;
  if (queued > 0) pieces.push(`${queued} queued`);
  const working = (counts.downloading || 0) + (counts.running_on_worker || 0);
  if (working) pieces.push(`${working} at work`);
  if (counts.cancelled) pieces.push(`${counts.cancelled} cancelled`);
  if (operation.excluded && operation.excluded.length) pieces.push(`${operation.excluded.length} skipped`);
  return `${title(operation, nodeName)}: ${pieces.join(", ")}.`;
}

/** A version for people: its name, or the beginning of its digest. */
export function version(installed) {
  return installed.version || (installed.digest || "").replace("sha256:", "").slice(0, 12) || "unknown version";
}

/** The version of each backend that most nodes have, by its name; the others drift from it. */
export function usualVersions(nodes) {
  const counts = new Map();
  for (const node of nodes) {
    for (const one of node.backends || []) {
      if (!counts.has(one.name)) counts.set(one.name, new Map());
      const versions = counts.get(one.name);
      versions.set(version(one), (versions.get(version(one)) || 0) + 1);
    }
  }
  return new Map([...counts].map(([name, versions]) => [name, [...versions].sort((a, b) => b[1] - a[1])[0][0]]));
}

/** A file's name without its directories, shortened in the middle. */
export function shortName(name, most = 36) {
  const last = (name || "").split("/").pop();
  return last.length > most ? `${last.slice(0, most / 2 - 1)}…${last.slice(1 - most / 2)}` : last;
}

/** Names in a sentence: "a, b and 3 more". */
export function names(list, most = 3) {
  if (list.length <= most)
    return list.length > 1 ? `${list.slice(0, -1).join(", ")} and ${list[list.length - 1]}` : list[0] || "";
  return `${list.slice(0, most).join(", ")} and ${list.length - most} more`;
}

/** The line that makes another machine a node; a shell reads its words as they are. The token is never in it. */
export function joinLine(origin, name, isService) {
  const words = [origin, ...(name ? ["--name", name] : []), ...(isService ? ["--service"] : [])];
  return `curl -fsS ${shellWord(`${origin}/join.sh`)} | sh -s -- ${words.map(shellWord).join(" ")}`;
}

function shellWord(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`;
}
