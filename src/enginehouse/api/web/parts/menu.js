// A menu behind a button. It is drawn over everything, so no table or panel cuts it off.

import { h } from "../dom.js";
import { changed } from "../live.js";

let shown = null; // {label, items, right, top, button}
const ROOM_PIXELS = 220;

/** The button; `items()` are `{label, act, colour?}`, made when it opens. */
export function menuButton(label, items) {
  return h(
    "button",
    {
      class: "quiet more",
      "aria-label": label,
      "aria-haspopup": "menu",
      onclick: (event) => {
        const button = event.currentTarget;
        const place = button.getBoundingClientRect();
        const isLow = place.bottom + ROOM_PIXELS > window.innerHeight;
        shown = {
          label,
          button,
          items: items().filter(Boolean),
          right: Math.max(8, document.documentElement.clientWidth - place.right),
          ...(isLow ? { bottom: window.innerHeight - place.top } : { top: place.bottom }),
        };
        changed(true);
      },
    },
    "⋯",
  );
}

/** Closes the menu and gives the focus back. Returns whether one was open. */
export function closeMenu() {
  if (!shown) return false;
  const { button } = shown;
  shown = null;
  changed(true);
  if (button.isConnected) button.focus();
  return true;
}

export function menuLayer() {
  if (!shown) return null;
  const style = {
    right: `${shown.right}px`,
    ...(shown.top !== undefined ? { top: `${shown.top}px` } : { bottom: `${shown.bottom}px` }),
  };
  return h(
    "div",
    { key: "menu", class: "menu-veil", onclick: closeMenu },
    h(
      "div",
      {
        class: "menu",
        role: "menu",
        "aria-label": shown.label,
        style,
        onkeydown: move,
        ref: (element) => element && setTimeout(() => element.querySelector("button").focus(), 0),
      },
      shown.items.map((item) =>
        h(
          "button",
          {
            key: item.label,
            role: "menuitem",
            class: item.colour,
            onclick: (event) => {
              event.stopPropagation();
              closeMenu();
              item.act();
            },
          },
          item.label,
        ),
      ),
    ),
  );
}

function move(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (event.key === "Tab") closeMenu();
  if (!step) return;
  const found = [...event.currentTarget.querySelectorAll("button")];
  found[(found.indexOf(document.activeElement) + step + found.length) % found.length].focus();
  event.preventDefault();
}
