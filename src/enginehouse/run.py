"""READ FIRST. The programs: a frontend, a worker, and `up`, a small parent of both and of a NATS server.

Only `build_frontend` and `build_worker` choose adapters. Each program is a few objects and a handful of loops in one
TaskGroup: an exception that escapes one of them ends the program in order, and its parent restarts it. Nothing is
decided here: the decisions are in `core`, the duties in `frontend` and `worker`. Imports are inside the functions,
because a worker does not need the database code, and the parent needs neither.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, TypeVar

import uvloop

from enginehouse.settings.origins import Origins
from enginehouse.settings.programs import FrontendSettings, UpSettings, WorkerSettings

if TYPE_CHECKING:
    from enginehouse.parent import Welcome

T = TypeVar("T")
SWITCH_SECONDS = 0.001  # Python's own is five times that, for each thread that is busy
COLLECT_AFTER = 50_000  # objects; a frontend with a thousand open streams holds about as many


def up(settings: UpSettings, welcome: Callable[[Welcome], None], origins: Origins) -> int:
    from enginehouse import parent

    os.umask(0o077)  # for the children too: files are readable by their owner only
    return asyncio.run(parent.run(settings, welcome, origins))


def frontend(settings: FrontendSettings) -> int:
    from enginehouse import frontends

    if frontends.is_parent(settings):
        os.umask(0o077)
        return asyncio.run(frontends.run(settings))
    from enginehouse import build_frontend

    # What the imports made lives as long as the program, so the garbage collector need not look at it. Requests make
    # few cycles: collecting seldom saves a twentieth of a warm request, and the pauses of whole collections.
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 20)
    # A thread that decodes the rows of a long list gives way sooner to requests and to transactions.
    sys.setswitchinterval(SWITCH_SECONDS)
    return _run(build_frontend.run(settings), settings, "frontend")


def worker(settings: WorkerSettings) -> int:
    from enginehouse import build_worker

    return _run(build_worker.run(settings), settings, "worker")


def _run(program: Coroutine[object, object, T], settings: FrontendSettings | WorkerSettings, name: str) -> T:
    """Run a program on uvloop. It logs one line per event to stderr, which `up` redirects to a file; otherwise also to
    a file of its own.
    """
    from enginehouse.host import program_log
    from enginehouse.host.log_limit import LimitedHandler

    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    logging.basicConfig(
        # Debug lines are ours alone: those of libraries would hide them.
        level=max(level, logging.INFO),
        format=program_log.FORMAT,
        datefmt=program_log.TIME_FORMAT,
        handlers=[LimitedHandler(sys.stderr)],
    )
    logging.getLogger("enginehouse").setLevel(level)
    logging.getLogger("alembic").setLevel(max(level, logging.WARNING))
    os.umask(0o077)
    program_log.keep_own_log(settings.data, name)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(program)
    except BaseExceptionGroup as group:
        # The group only wraps; report the first error in it.
        cause: BaseException = group
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        raise cause from None
