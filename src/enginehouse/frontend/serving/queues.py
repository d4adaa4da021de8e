"""Requests that wait because every replica of their model has as many requests as it can answer at once.

First come, first served, fair between tokens, bounded in length and time. A request leaves its queue with a route, with
an error, or because its client is gone. The router gives routes to waiting requests at the moment when there is room,
so nobody who comes later gets ahead of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec import Struct

from enginehouse.core.errors import EnginehouseError, RateLimited, Unavailable
from enginehouse.core.fair_queue import FairQueue
from enginehouse.core.routing import Route

LENGTH = 1024  # of one model on one frontend: each waiting request has a connection and its body
WAIT_SECONDS = 60.0  # as long as for a load; clients and proxies give up soon after
RETRY_FULL_SECONDS = 2.0  # a full queue moves on with every answer
RETRY_LATE_SECONDS = 10.0  # whoever waited in vain meets the same queue if it returns at once


class Waiter(Struct, eq=False):
    """One waiting request. Its place is a route, or None if it has to look for one again."""

    token: str
    body: bytes
    place: asyncio.Future[Route | None]


class RequestQueues:
    def __init__(self, *, length: int = LENGTH, wait_seconds: float = WAIT_SECONDS) -> None:
        self._length = length
        self._wait_seconds = wait_seconds
        # A model is in here only while requests wait for it. Every request looks here, at the cost of a look.
        self.by_model: dict[str, FairQueue[Waiter]] = {}
        self.refused: dict[tuple[str, str], int] = {}  # since the start, by model and reason: `full`, `late`

    def lengths(self) -> dict[str, int]:
        return {model: len(queue) for model, queue in self.by_model.copy().items()}  # also asked for in threads

    async def wait(self, model: str, token: str, body: bytes, give_back: Callable[[Route], None]) -> Route | None:
        """Wait for a route that has room; None means that the caller has to look again. A route that was given to a
        request which has ended meanwhile goes to `give_back`.
        """
        waiter = Waiter(token, body, asyncio.get_running_loop().create_future())
        self._join(model, waiter)
        try:
            async with asyncio.timeout(self._wait_seconds):
                return await waiter.place
        except TimeoutError:
            given = _given(waiter.place)
            if given is None:
                raise self._refusal(model, "late") from None
            return given
        except asyncio.CancelledError:
            given = _given(waiter.place)
            if given is not None:
                give_back(given)
            raise
        finally:
            self._leave(model, waiter)

    def take(self, model: str) -> Waiter | None:
        """The request whose turn it is; None if nobody waits."""
        while (queue := self.by_model.get(model)) is not None:
            waiter = queue.take()
            if not len(queue):
                del self.by_model[model]
            if waiter is not None and not waiter.place.done():
                return waiter
        return None

    def send_away(self, model: str) -> None:
        """Let all requests for a model look again: it has no routes, so it has to be loaded."""
        while (waiter := self.take(model)) is not None:
            waiter.place.set_result(None)

    def _join(self, model: str, waiter: Waiter) -> None:
        queue = self.by_model.get(model) or FairQueue()
        if len(queue) >= self._length:
            displaced = queue.displaced_by(waiter.token)
            if displaced is None:
                raise self._refusal(model, "full")
            if not displaced.place.done():
                displaced.place.set_exception(self._refusal(model, "full"))
        queue.add(waiter.token, waiter)
        self.by_model[model] = queue

    def _leave(self, model: str, waiter: Waiter) -> None:
        queue = self.by_model.get(model)
        if queue is not None and queue.remove(waiter.token, waiter) and not len(queue):
            del self.by_model[model]

    def _refusal(self, model: str, reason: str) -> EnginehouseError:
        self.refused[model, reason] = self.refused.get((model, reason), 0) + 1
        error: EnginehouseError
        if reason == "full":
            error = RateLimited(
                f"cannot answer now: all replicas of {model} are busy and {self._length} requests wait for them; retry "
                "later, or add replicas",
                param="model",
            )
            error.retry_after_seconds = RETRY_FULL_SECONDS
        else:
            error = Unavailable(
                f"cannot answer: no replica of {model} became free within {self._wait_seconds:g} s; retry later, or "
                "add replicas",
                param="model",
            )
            error.retry_after_seconds = RETRY_LATE_SECONDS
        return error


def _given(place: asyncio.Future[Route | None]) -> Route | None:
    """The route that was given to a request in the moment when it ended; None if there is none."""
    if not place.done() or place.cancelled() or place.exception() is not None:
        return None
    return place.result()
