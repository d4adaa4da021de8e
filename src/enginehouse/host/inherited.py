"""What a frontend gets from the parent that started it: `enginehouse up` or `frontend --processes`.

Each is a variable of the environment, taken out of it when it is read: what a frontend starts must not have it too.
"""

from __future__ import annotations

import os
import socket

LISTEN_VARIABLE = "ENGINEHOUSE_LISTEN_FD"
OWNER_VARIABLE = "ENGINEHOUSE_OWNER"
KEYS_VARIABLE = "ENGINEHOUSE_KEYS"
PORT_VARIABLE = "ENGINEHOUSE_SHARED_PORT"


def inherited_listener() -> socket.socket | None:
    """Return the socket that `up` keeps open while frontends restart; None in a frontend that runs alone."""
    descriptor = os.environ.pop(LISTEN_VARIABLE, "")
    return socket.socket(fileno=int(descriptor)) if descriptor else None


def inherited_owner() -> str:
    """Return the owner of leases that `up` gave to this frontend; "" in a frontend that runs alone."""
    return os.environ.pop(OWNER_VARIABLE, "")


def inherited_keys() -> str:
    """What `up` says of its keys: "kept", or "new" if they may replace others; "" in a frontend that runs alone."""
    return os.environ.pop(KEYS_VARIABLE, "")


def inherited_port() -> int | None:
    """The port that this frontend shares with others of one parent; None in a frontend that runs alone."""
    found = os.environ.pop(PORT_VARIABLE, "")
    return int(found) if found else None


def has_inherited_port() -> bool:
    return PORT_VARIABLE in os.environ
