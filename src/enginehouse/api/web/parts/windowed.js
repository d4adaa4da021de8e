// A long list of which only the rows in sight exist. Rows have one height.

import { h } from "../dom.js";
import { changed } from "../live.js";

const BEYOND = 6; // rows above and below those in sight
const tops = new Map(); // how far each list is scrolled

export function windowed(name, items, rowPixels, row, { height = 620 } = {}) {
  const whole = items.length * rowPixels;
  const top = Math.min(tops.get(name) || 0, Math.max(0, whole - height));
  const first = Math.max(0, Math.floor(top / rowPixels) - BEYOND);
  const last = Math.min(items.length, Math.ceil((top + height) / rowPixels) + BEYOND);
  return h(
    "div",
    {
      key: `window ${name}`,
      class: "window",
      tabindex: "0",
      role: "list",
      "aria-label": name,
      style: { "max-height": `${height}px` },
      onscroll: (event) => {
        const before = Math.floor((tops.get(name) || 0) / rowPixels);
        tops.set(name, event.target.scrollTop);
        if (Math.abs(Math.floor(event.target.scrollTop / rowPixels) - before) >= 1) changed(true);
      },
    },
    h(
      "div",
      { class: "all", style: { height: `${whole}px` } },
      items.slice(first, last).map((item, at) =>
        h(
          "div",
          {
            key: first + at,
            class: "slot",
            role: "listitem",
            "aria-setsize": items.length,
            "aria-posinset": first + at + 1,
            style: { top: `${(first + at) * rowPixels}px`, height: `${rowPixels}px` },
          },
          row(item),
        ),
      ),
    ),
  );
}
