"""Blocking work off the event loop that is never left behind.

A cancelled `asyncio.to_thread` returns at once while its thread goes on: a clean-up that follows would then race with
the very step it cleans up after. `in_thread` waits for the step to end first, whatever happens meanwhile. So it is for
disk work that ends by itself, never for waiting on anything.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    future = asyncio.get_running_loop().run_in_executor(None, partial(function, *args, **kwargs))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # seen: the cancellation is what the caller hears
        raise
