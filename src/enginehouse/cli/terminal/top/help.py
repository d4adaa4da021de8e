"""What the keys do. The keys of the page do the same here."""

from __future__ import annotations

HELP = (
    "f  Fleet      o  Operations      b  Backends      m  Models      (also g f, g o, g b, g m)",
    "j k  move, past the top to what needs you (Tab too)",
    "Enter  open      Esc  back      /  search      q  quit",
    "",
    "Node:       a approve    d drain    r resume    x remove",
    "Operation:  c cancel    r retry    D dismiss; on the row of a node: only there",
    "Backend:    u upgrade, after its plan was shown",
    "Model:      l load    u unload    s scale    Enter explains where it can be",
    "",
    "● is so      ◌ not heard, or no longer      ○ waits      ↑ newer version      ≠ differs",
    "A dash is a figure that is not known.",
)
