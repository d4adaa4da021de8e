// Drawings as SVG: lines of the last hour, small lines in rows, squares. Each has a text that says the same. Gaps stay gaps.

import { h } from "./dom.js";

/** The pieces of a line without unknown values, as points of an SVG. */
export function pieces(values, width, height, top, above = 0) {
  const found = [];
  let piece = [];
  values.forEach((value, at) => {
    if (value === null || value === undefined) {
      if (piece.length) found.push(piece);
      piece = [];
      return;
    }
    const x = values.length > 1 ? (at * width) / (values.length - 1) : width;
    piece.push(`${x.toFixed(1)},${(height - (Math.min(value, top) / top) * (height - above)).toFixed(1)}`);
  });
  if (piece.length) found.push(piece);
  return found.map((one) =>
    (one.length > 1 ? one : [one[0], `${(parseFloat(one[0]) + 1).toFixed(1)},${one[0].split(",")[1]}`]).join(" "),
  );
}

const known = (values) => values.filter((value) => value !== null && value !== undefined);

/** The next round figure above the highest value, so that the axis holds still. */
export function ceiling(values) {
  const highest = Math.max(0, ...known(values));
  if (highest <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(highest));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => one >= highest);
}

/** The averages of neighbours, so that a small line has no more points than can be seen. */
function fewer(values, most) {
  const each = Math.ceil(values.length / most);
  if (each <= 1) return values;
  const found = [];
  for (let from = 0; from < values.length; from += each) {
    let [sum, many] = [0, 0];
    for (let at = Math.min(from + each, values.length) - 1; at >= from; at -= 1) {
      if (values[at] === null || values[at] === undefined) continue;
      sum += values[at];
      many += 1;
    }
    found.push(many ? sum / many : null);
  }
  return found;
}

/** A small line without axes. It is drawn once for the same list. */
export function spark(values, options) {
  if (!sparks.has(values)) sparks.set(values, drawnSpark(values, options));
  return sparks.get(values);
}

const sparks = new WeakMap(); // by the list of values, which is another one when a value is added

function drawnSpark(values, { label, top, width, height }) {
  const lines = pieces(fewer(values, width / 2), width, height - 1, top || ceiling(values), 1);
  return h(
    "svg",
    {
      class: "spark",
      viewBox: `0 0 ${width} ${height}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": lines.length ? label : `${label}: no figures yet`,
    },
    lines.map((points) => h("polyline", { points })),
  );
}

/** One plot of the last hour, with its highest and its present value in words. */
export function plot(title, values, { format, stepSeconds = 10, isShare = false } = {}) {
  const [width, height] = [360, 96];
  const top = isShare ? 1 : ceiling(values);
  const all = known(values);
  const last = values.length ? values[values.length - 1] : null;
  const shown = last === null || last === undefined ? "–" : format(last);
  const text = all.length
    ? `now ${shown}, at most ${format(Math.max(...all))} in the last ${Math.round((values.length * stepSeconds) / 60)} minutes`
    : "no figures yet";
  return h(
    "figure",
    { class: "plot" },
    h("figcaption", null, h("span", null, title), h("strong", null, shown)),
    h(
      "svg",
      {
        viewBox: `0 0 ${width} ${height + 14}`,
        role: "img",
        "aria-label": `${title}: ${text}`,
        preserveAspectRatio: "none",
      },
      h("line", { class: "axis", x1: 0, x2: width, y1: height, y2: height }),
      h("line", { class: "grid", x1: 0, x2: width, y1: height / 2, y2: height / 2 }),
      pieces(values, width, height, top, 4).map((points) => h("polyline", { points })),
    ),
    h(
      "div",
      { class: "range" },
      h("span", null, `${Math.round((values.length * stepSeconds) / 60)} min ago`),
      h("span", null, all.length ? `highest ${format(Math.max(...all))}` : "no figures yet"),
      h("span", null, "now"),
    ),
  );
}

/** Wanted and actual replicas as squares: filled, empty, and those that are too many. */
export function squares(actual, wanted) {
  const boxes = [];
  for (let at = 0; at < Math.min(24, Math.max(actual, wanted)); at += 1)
    boxes.push(at < actual ? (at < wanted || !wanted ? "full" : "extra") : "missing");
  return h(
    "span",
    { class: "squares", role: "img", "aria-label": `${actual} of ${wanted || actual} wanted replicas` },
    boxes.map((kind) => h("span", { class: kind })),
  );
}
