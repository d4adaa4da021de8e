// The keyboard: `g` and a letter goes to a page, `/` searches, `j` and `k` move, `?` shows all. `enginehouse top` has the same.

import { go } from "./route.js";
import { closeTop, isOpen, openHelp } from "./parts/layers.js";

export const PLACES = {
  f: ["fleet", "Fleet"],
  o: ["operations", "Operations"],
  b: ["backends", "Backends"],
  m: ["models", "Models"],
  c: ["chat", "Chat"],
  l: ["logs", "Logs"],
  a: ["access", "Access"],
  s: ["settings", "Settings"],
};

const AFTER_G_MS = 1500;
let pressedG = 0;

export function listen(isActive) {
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      if (closeTop()) event.preventDefault();
      return;
    }
    if (!isActive() || isOpen() || isWriting(event.target) || event.ctrlKey || event.metaKey || event.altKey) return;
    if (act(event.key)) event.preventDefault();
  });
}

function isWriting(target) {
  return target.isContentEditable || ["INPUT", "TEXTAREA", "SELECT"].includes(target.tagName);
}

function act(key) {
  const isAfterG = performance.now() - pressedG < AFTER_G_MS;
  pressedG = 0;
  if (isAfterG && PLACES[key]) {
    go(`/${PLACES[key][0]}`);
    return true;
  }
  switch (key) {
    case "g":
      pressedG = performance.now();
      return true;
    case "/":
      return focusOn(document.querySelector("[data-search]"));
    case "j":
      return step(1);
    case "k":
      return step(-1);
    case "?":
      openHelp();
      return true;
    default:
      return false;
  }
}

/** Moves the focus over the rows of a page (`data-row`). */
function step(by) {
  const rows = [...document.querySelectorAll("[data-row]")];
  if (!rows.length) return false;
  const at = rows.indexOf(document.activeElement);
  const next = at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, at + by));
  return focusOn(rows[next]);
}

function focusOn(element) {
  if (!element) return false;
  element.focus();
  return true;
}
