// An operation as one row of a list, and its nodes as rows below it.

import { nameOf } from "../attention.js";
import { h, memo } from "../dom.js";
import { isEnded, OPEN_ROWS } from "../state.js";
import * as words from "../words.js";
import { copy } from "./layers.js";
import { bar, pill } from "./marks.js";

export function operationRow(operation, context) {
  const { state, now } = context;
  const name = nameOf(state);
  const at = words.seconds(operation.createdAt);
  const ended = isEnded(operation);
  const isShown = context.route.parts[0] === operation.jobID; // beside this list
  return memo(`row ${operation.jobID}`, [operation, words.ago(at, now), state.nodes.get(operation.name), isShown], () =>
    h(
      "a",
      {
        key: operation.jobID,
        class: ["row", ended && "ended"],
        "aria-current": isShown ? "page" : undefined,
        href: `#/operations/${operation.jobID}`,
        "data-row": true,
      },
      h("span", { class: "cell mark" }, pill(words.operationMark(operation))),
      h("span", { class: "cell name" }, words.title(operation, name)),
      h("span", { class: "cell count" }, operation.totals.count ? words.doneOf(operation) : ""),
      h(
        "span",
        { class: "cell progress" },
        ended
          ? h("span", { class: "muted" }, summary(operation))
          : [
              bar(operation.totals.percent, { label: words.title(operation, name) }),
              h("span", { class: "amount" }, words.amountOf(operation)),
            ],
      ),
      h("span", { class: "cell left" }, ended ? took(operation.createdAt, operation.finishedAt) : words.timeLeft(operation)),
      h("span", { class: "cell who muted" }, operation.author),
      h("span", { class: "cell age muted", title: words.absolute(at) }, words.ago(at, now)),
    ),
  );
}

function took(startedAt, finishedAt) {
  const [from, to] = [words.seconds(startedAt), words.seconds(finishedAt)];
  return from && to > from ? `took ${to - from < 1 ? "under 1 s" : words.span(to - from)}` : "";
}

/** How each node fared, in a few words. */
function summary(operation) {
  const counts = operation.counts || {};
  const pieces = [
    counts.error && `${counts.error} failed`,
    counts.cancelled && `${counts.cancelled} cancelled`,
    counts.superseded && `${counts.superseded} superseded`,
    (operation.excluded_count || (operation.excluded || []).length) &&
      `${operation.excluded_count || operation.excluded.length} skipped`,
  ].filter(Boolean);
  const text = pieces.join(", ");
  return operation.error && operation.status !== "succeeded"
    ? `${text ? `${text}: ` : ""}${operation.error.slice(0, 160)}`
    : text;
}

const BUSY = "The worker has not answered for a while; it is still working. Nothing is sent twice.";

/** One node of an operation. */
export function nodeRow(row, operation, { canAct, now, onCancel, onRetry }) {
  const isOpen = OPEN_ROWS.has(row.status);
  const isBusy = row.status === "running_on_worker";
  return memo(`node ${row.intent}`, [row, canAct, row.due_in_seconds ? Math.floor(now) : 0, operation.status], () =>
    h(
      "article",
      { key: row.intent, class: ["noderow", row.status], "data-row": true, tabindex: "0" },
      h(
        "span",
        { class: "cell node" },
        h("a", { href: `#/nodes/${encodeURIComponent(row.node_name)}` }, row.node_name),
      ),
      h("span", { class: "cell mark" }, pill(words.rowMark(row), isBusy ? `${BUSY} ${row.error || ""}` : "")),
      h(
        "span",
        { class: "cell what" },
        row.action,
        row.file_name && h("code", { title: row.file_name }, words.shortName(row.file_name)),
      ),
      h(
        "span",
        { class: "cell progress" },
        isOpen && row.state === "running"
          ? [
              bar(row.percentage || (row.total_bytes ? 0 : null), { label: `${row.node_name}: ${row.action}` }),
              h("span", { class: "amount" }, words.bytesOf(row.current_bytes, row.total_bytes)),
              h("span", { class: "amount" }, words.rateText(row, row.current_bytes < row.total_bytes)),
              h("span", { class: "percent" }, row.total_bytes ? `${Math.floor(row.percentage)} %` : ""),
            ]
          : h("span", { class: "muted" }, row.note || reason(row)),
      ),
      h(
        "span",
        { class: "cell attempt" },
        [
          row.attempt > 1 && `try ${row.attempt}`,
          row.due_in_seconds && `next in ${words.span(row.due_in_seconds)}`,
          !isOpen && took(row.startedAt, row.finishedAt),
        ]
          .filter(Boolean)
          .join(" · "),
      ),
      h(
        "span",
        { class: "cell buttons" },
        canAct &&
          isOpen &&
          h(
            "button",
            { class: "quiet", "aria-label": `Cancel on ${row.node_name}`, onclick: () => onCancel(row) },
            "Cancel",
          ),
        canAct &&
          !isOpen &&
          row.status !== "success" &&
          h(
            "button",
            { "aria-label": `Retry on this node: ${row.node_name}`, onclick: () => onRetry(row) },
            "Retry on this node",
          ),
      ),
      row.error &&
        row.status !== "success" &&
        !(isOpen && REASONS[row.reason]) &&
        h(
          "p",
          { class: ["why", row.status === "error" ? "bad" : "muted"] },
          isBusy ? `${BUSY} ${row.error}` : row.error,
          row.status === "error" && [
            " ",
            h(
              "button",
              {
                class: "quiet small",
                "aria-label": `Copy the error of ${row.node_name}`,
                onclick: () => copy(`${words.title(operation)} on ${row.node_name}: ${row.error}`),
              },
              "Copy",
            ),
          ],
        ),
    ),
  );
}

const REASONS = { node_away: "starts when the node reconnects", draining: "starts when the node is resumed" };

function reason(row) {
  return REASONS[row.reason] || (row.status === "queued" && row.attempt === 0 && !row.error ? "waits for its turn" : "");
}
