"""The small files of a data directory that a server needs: its keys, its settings, its place on the network.

They go into a backup and come from it. A restore that was killed between two of them leaves a mark, and a server that
finds it refuses to start: half of the old state and half of the new one is neither.
"""

from __future__ import annotations

from pathlib import Path

from enginehouse.core.errors import Conflict
from enginehouse.core.key_record import KEY_FILES
from enginehouse.host import disk

# Beside the keys: the settings; who this machine is as a node; the port at which workers know the bus.
KEPT_FILES = (*KEY_FILES, "enginehouse.toml", "node.json", "bus/port")
UNFINISHED = ".restoring"


def read_keys(data: Path) -> dict[str, bytes]:
    """The keys that are there, by their names."""
    return _read(data, KEY_FILES)


def read_kept(data: Path) -> dict[str, bytes]:
    return _read(data, KEPT_FILES)


def refuse_unfinished(data: Path) -> None:
    if (data / UNFINISHED).exists():
        raise Conflict(
            f"cannot use {data}: a restore into it was interrupted; run the same `enginehouse restore` again",
            code="restore_unfinished",
        )


def _read(data: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with disk.naming_the_file(data):
        for name in names:
            path = data / name
            if path.is_file():
                found[name] = path.read_bytes()
    return found
