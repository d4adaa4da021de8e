"""What was seen of things that change, newest first: an older state never replaces a newer one.

Pure: the caller gives the time. Progress never moves back, in whatever order and however often states arrive: a row
that has ended stays as it ended, a later attempt replaces an earlier one, and within one attempt bytes only grow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

from enginehouse.core.views import NodeRow, OperationView

K = TypeVar("K")
V = TypeVar("V")

_STAGES = {"accepted": 0, "running": 1, "waiting": 2}  # of one attempt; every other state is an end
_ENDED = 3


class SeenTable(Generic[K, V]):
    """Things by key, each with the time at which it was heard."""

    def __init__(self) -> None:
        self.rows: dict[K, V] = {}
        self.heard: dict[K, float] = {}
        self._gone: dict[K, float] = {}

    def put(self, key: K, value: V, at: float) -> None:
        self.rows[key], self.heard[key] = value, at

    def remove(self, key: K, at: float) -> None:
        self.rows.pop(key, None)
        self.heard.pop(key, None)
        self._gone[key] = at

    def keep_only(self, keys: set[K], at: float) -> None:
        for key in set(self.rows).difference(keys):
            self.remove(key, at)

    def replace(self, listed: Mapping[K, V], began: float, at: float) -> None:
        """Take over a list that was asked for at `began`. What was heard since then is newer than the list."""
        for key, value in listed.items():
            if max(self._gone.get(key, -1.0), self.heard.get(key, -1.0)) < began:
                self.put(key, value, at)
        for key in [one for one, heard in self.heard.items() if one not in listed and heard < began]:
            self.remove(key, at)
        self._gone = {key: when for key, when in self._gone.items() if when >= began}


def rank(row: NodeRow) -> tuple[bool, int, int]:
    stage = _STAGES.get(row.state, _ENDED)
    return stage == _ENDED, row.attempt, stage


def later_row(known: NodeRow, new: NodeRow) -> NodeRow:
    """The later of two states of one row, with the progress of both."""
    if rank(new) < rank(known):
        return known
    percentage = max(known.percentage, new.percentage)
    is_behind = (new.current_bytes or 0) < (known.current_bytes or 0)
    # A later attempt counts anew; without any count, the row shows the last one.
    if is_behind and (new.attempt == known.attempt or not new.total_bytes):
        return msgspec.structs.replace(
            new,
            percentage=percentage,
            phase=new.phase if new.status == "running_on_worker" else known.phase,
            file_name=known.file_name,
            current=known.current,
            total=known.total,
            current_bytes=known.current_bytes,
            total_bytes=known.total_bytes,
        )
    return msgspec.structs.replace(new, percentage=percentage)


def later_operation(known: OperationView, new: OperationView) -> OperationView:
    """The operation after an event or an answer; an older one changes nothing."""
    if new.revision < known.revision:
        return known
    merged = known.followed_by(new)
    rows = {row.intent: row for row in known.nodes}
    nodes = [later_row(rows[row.intent], row) if row.intent in rows else row for row in merged.nodes]
    return msgspec.structs.replace(merged, nodes=nodes, progress=max(known.progress, new.progress))


def bytes_of(operation: OperationView) -> tuple[int, int]:
    """Bytes done and in total, over all rows whose size is known; what has succeeded was fetched in full."""
    done = total = 0
    for row in operation.nodes:
        total += row.total_bytes or 0
        done += (row.total_bytes if row.status == "success" else row.current_bytes) or 0
    return done, total
