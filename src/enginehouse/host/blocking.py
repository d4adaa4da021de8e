"""Blocking work off the event loop that is never left behind.

A cancelled `asyncio.to_thread` returns at once while its thread goes on: a clean-up that follows would then race with
the very step it cleans up after. `in_thread` waits for the step to end first, whatever happens meanwhile. So it is for
disk work that ends by itself; `in_own_thread` is for work that waits, and is told to stop waiting.
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
    return await _outlive(asyncio.get_running_loop().run_in_executor(None, partial(function, *args, **kwargs)))


async def in_own_thread(work: Callable[[], T], stop: Callable[[], None]) -> T:
    """`work` in a thread that no other work waits for; on cancellation `stop` must make it end.

    The shared threads are few: work that waits for bytes must not keep from running what writes those bytes.
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
        except BaseException as error:  # raised again where it is awaited
            loop.call_soon_threadsafe(deliver, None, error)
        else:
            loop.call_soon_threadsafe(deliver, result, None)

    threading.Thread(target=run, name="work", daemon=True).start()
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        stop()
        return await _outlive(future, is_cancelled=True)


async def _outlive(future: asyncio.Future[T], *, is_cancelled: bool = False) -> T:
    try:
        if is_cancelled:
            raise asyncio.CancelledError
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # seen: the cancellation is what the caller hears
        raise
