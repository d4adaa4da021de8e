"""Blocking calls in threads that have always ended when the await returns.

A cancelled `asyncio.to_thread` returns at once while its thread continues, and a clean-up would race with the step that
it cleans up after. `in_thread` waits for the end of the thread, also on cancellation, so it is for disk work that ends
without outside help. `in_own_thread` is for work that waits for events, and calls `stop` on cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await _wait_for_end(asyncio.get_running_loop().run_in_executor(None, partial(function, *args, **kwargs)))


async def in_own_thread(work: Callable[[], T], stop: Callable[[], None]) -> T:
    """Run `work` in a dedicated thread. On cancellation `stop` must make it end.

    The shared pool is small: work that waits for bytes must not block the thread that would write those bytes.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # raised again in the awaiting task
            loop.call_soon_threadsafe(deliver, None, error)
        else:
            loop.call_soon_threadsafe(deliver, result, None)

    threading.Thread(target=run, name="work", daemon=True).start()
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        stop()
        return await _wait_for_end(future, is_cancelled=True)


async def _wait_for_end(future: asyncio.Future[T], *, is_cancelled: bool = False) -> T:
    try:
        if is_cancelled:
            raise asyncio.CancelledError
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # marked as retrieved; the caller gets the cancellation instead
        raise
