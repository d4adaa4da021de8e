"""Whether the server reaches this worker: asked now and then, and kept in a file for `enginehouse doctor`.

Heartbeats prove one direction only. A worker whose ports are closed looks healthy, and its logs and files cannot be
read; this is noticed here and logged once. An older server that cannot say it is not asked for a long time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from enginehouse.core.errors import EnginehouseError, NotFound
from enginehouse.core.finding import Finding, ReachRecord
from enginehouse.host import disk
from enginehouse.host.blocking import in_thread
from enginehouse.link.client import FrontendClient

log = logging.getLogger(__name__)

STEP_SECONDS = 5.0  # until the worker has joined
AGAIN_SECONDS = 300.0
AFTER_FAILURE_SECONDS = 30.0  # whoever opens a port wants to see that it helped
ASK_SECONDS = 10.0


class _Node(Struct):
    id: str


class ReachWatch:
    def __init__(
        self,
        clients: Sequence[FrontendClient],
        node_file: Path,
        token: Callable[[], str],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clients = list(clients)
        self._node_file = node_file
        self._token = token
        self._monotonic = monotonic
        self._due_at = 0.0
        self._was_reached = True

    async def step(self) -> None:
        if self._monotonic() < self._due_at or not self._token():
            return
        self._due_at = self._monotonic() + AGAIN_SECONDS
        found = await in_thread(self._ask)
        if found is None:
            return
        is_reached = found.level != "problem"
        if not is_reached:
            self._due_at = self._monotonic() + AFTER_FAILURE_SECONDS
        if is_reached != self._was_reached:
            log.warning("worker.%s reason=%s", "reached_again" if is_reached else "not_reached", found.message)
        self._was_reached = is_reached

    def _ask(self) -> Finding | None:
        """The first answer of a frontend, stored; None without one. Blocks."""
        try:
            node = msgspec.json.decode(self._node_file.read_bytes(), type=_Node)
        except (OSError, msgspec.DecodeError):
            return None
        for client in self._clients:
            try:
                found = client.request(
                    "GET",
                    f"/api/node/{node.id}/reach",
                    None,
                    Finding,
                    token=self._token(),
                    timeout_seconds=ASK_SECONDS,
                )
            except NotFound:
                return None  # an older server
            except EnginehouseError:
                continue
            record = ReachRecord(at=time.time(), finding=found)
            disk.write_atomic(self._node_file.with_name("reach.json"), msgspec.json.encode(record), 0o600)
            return found
        return None
