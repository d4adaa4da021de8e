"""Requests that wait for the load of their model: one load however many wait, and all of them get the same outcome.

A load belongs to nobody: it continues if every request that waits for it ends. Of the requests for one model one at a
time asks the store how its load stands, which another frontend may steer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from math import ceil
from typing import Protocol

from enginehouse.core.errors import EnginehouseError, Unavailable
from enginehouse.core.ids import OperationId

# Between two questions how a load stands, which another frontend may steer: one for all requests that wait for it.
LOOK_AGAIN_SECONDS = 0.5


class Loads(Protocol):
    """The part of the loader that the router uses."""

    async def ensure(self, model: str, dead: Collection[str], waiting_for: str = "") -> OperationId:
        """Start or join a load and return its operation's id; "" if there is a replica other than the processes known
        to be `dead`. Raises if the model is unknown or its last load just failed, or if the load that the caller was
        `waiting_for` was cancelled or superseded.
        """

    async def loading(self, operation_id: OperationId) -> dict[str, object]:
        """Return the `loading` object of a 503."""


class Pending:
    """The load that the waiting requests for one model share."""

    def __init__(self) -> None:
        self.asking = asyncio.Lock()
        self.operation_id = OperationId("")
        self.waiters = 0
        self.asked_at: float | None = None
        self.failure: EnginehouseError | None = None

    @property
    def was_just_asked(self) -> bool:
        now = asyncio.get_running_loop().time()
        return self.asked_at is not None and now - self.asked_at < LOOK_AGAIN_SECONDS


class LoadWaits:
    def __init__(
        self,
        loads: Loads,
        wait_seconds: float | None,
        has_route: Callable[[str], bool],
        dead_of: Callable[[str], Collection[str]],
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        """`wait_seconds` is how long a request waits; None means no limit. `has_route` says whether a model has a route
        by now, `dead_of` which of its processes are known to be gone. `refresh` reads the routes again.
        """
        self._loads = loads
        self._wait_seconds = wait_seconds
        self._has_route = has_route
        self._dead_of = dead_of
        self._refresh = refresh
        self.pending: dict[str, Pending] = {}
        self._changed = asyncio.Event()

    def look_now(self) -> None:
        """Let all who wait look whether there is a route."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, model: str) -> None:
        """Wait for a route. Of the requests that wait for one model, one at a time queries the store."""
        pending = self.pending.setdefault(model, Pending())
        pending.waiters += 1
        try:
            async with asyncio.timeout(self._wait_seconds):
                await self._wait_for_route(model, pending)
        except TimeoutError:
            raise await self._still_loading(model, pending.operation_id) from None
        finally:
            pending.waiters -= 1
            if not pending.waiters:
                self._close(model, pending)

    def _close(self, model: str, pending: Pending) -> None:
        """End the sharing: later requests begin a new wait."""
        if self.pending.get(model) is pending:
            del self.pending[model]

    async def _wait_for_route(self, model: str, pending: Pending) -> None:
        while True:
            changed = self._changed
            if self._has_route(model):
                self._close(model, pending)
                return
            await self._ask(model, pending)
            if pending.failure is not None:
                raise pending.failure
            try:
                async with asyncio.timeout(LOOK_AGAIN_SECONDS):
                    await changed.wait()
            except TimeoutError:
                continue

    async def _ask(self, model: str, pending: Pending) -> None:
        """Check the load once for all waiting requests; all of them get the same error."""
        if pending.was_just_asked:
            return
        async with pending.asking:
            if pending.was_just_asked or pending.failure is not None:
                return  # checked while this request waited for the lock
            try:
                found = await self._loads.ensure(model, self._dead_of(model), pending.operation_id)
                pending.operation_id = found or pending.operation_id
                if not found:
                    await self._refresh()  # another frontend has loaded it
            except EnginehouseError as error:
                pending.failure = error
                self._close(model, pending)
            pending.asked_at = asyncio.get_running_loop().time()

    async def _still_loading(self, model: str, operation_id: OperationId) -> Unavailable:
        error = Unavailable(
            f"cannot answer yet: {model} is still loading; retry in a moment", code="model_loading", param="model"
        )
        error.retry_after_seconds = min(300.0, max(5.0, ceil(self._wait_seconds or 0.0)))
        if operation_id:
            error.details["loading"] = await self._loads.loading(operation_id)
        else:
            error.details["loading"] = {"model": model, "state": "pending", "progress": 0.0}
        return error
