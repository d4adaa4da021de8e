"""READ FIRST. The programs: a frontend, a worker, and `up`, a small parent of both and of a NATS server.

Only `build_frontend` and `build_worker` choose adapters. Each program is a few objects and a handful of loops in one
TaskGroup: an exception that escapes one of them ends the program in order, and its parent restarts it. Nothing is
decided here: the decisions are in `core`, the duties in `frontend` and `worker`. Imports are inside the functions,
because a worker does not need the database code, and the parent needs neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from enginehouse.host.inherited import has_inherited_port
from enginehouse.settings.origins import Origins
from enginehouse.settings.programs import FrontendSettings, UpSettings, WorkerSettings

if TYPE_CHECKING:
    from enginehouse.backups import BackupSummary
    from enginehouse.parent import Welcome

T = TypeVar("T")
SWITCH_SECONDS = 0.001  # Python's own is five times that, for each thread that is busy
# New objects between two collections of the young ones, which are so long a pause for everything; and how many of these
# come before one of those that have stayed, such as the rows of operations under way.
COLLECT_AFTER, YOUNG_COLLECTIONS = 5_000, 200


def up(settings: UpSettings, welcome: Callable[[Welcome], None], origins: Origins, *, new_keys: bool = False) -> int:
    with _no_collecting():
        from enginehouse import parent

    os.umask(0o077)  # for the children too: files are readable by their owner only
    return asyncio.run(parent.run(settings, welcome, origins, new_keys=new_keys))


def frontend(settings: FrontendSettings) -> int:
    # Its children read the same settings.
    if settings.processes > 1 and not has_inherited_port():
        from enginehouse import frontends

        os.umask(0o077)
        return asyncio.run(frontends.run(settings))
    with _no_collecting():
        from enginehouse import build_frontend

    # What the imports made lives as long as the program, so the garbage collector need not look at it. Requests make
    # few cycles: collecting seldom what has stayed saves a twentieth of a warm request, and long pauses.
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, YOUNG_COLLECTIONS, 20)
    # A thread that decodes the rows of a long list gives way sooner to requests and to transactions.
    sys.setswitchinterval(SWITCH_SECONDS)
    return _run(build_frontend.run(settings), settings, "frontend")


def worker(settings: WorkerSettings) -> int:
    with _no_collecting():
        from enginehouse import build_worker

    return _run(build_worker.run(settings), settings, "worker")


@contextlib.contextmanager
def _no_collecting() -> Iterator[None]:
    """Imports make objects that stay, among which the garbage collector would look again and again in vain."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def backup(file: Path, data: Path, database_url: str, passphrase: str, *, force: bool) -> BackupSummary:
    from enginehouse import backups
    from enginehouse.settings.shown import sqlite_url

    return backups.make(file, data, database_url or sqlite_url(data), passphrase, force=force)


def restore(file: Path, data: Path, database_url: str, passphrase: str, *, force: bool) -> BackupSummary:
    from enginehouse import backups
    from enginehouse.settings.shown import sqlite_url

    os.umask(0o077)
    return backups.restore(file, data, database_url or sqlite_url(data), passphrase, force=force)


def node_key(data: Path) -> str:
    """The public key of this machine as a node; made now if there is none."""
    from enginehouse.host import disk, signing
    from enginehouse.host.key_file import load_key_file

    disk.make_usable(data)
    with disk.naming_the_file(data):
        return signing.public_key_of(load_key_file(data / "node.key"))


def is_encrypted(file: Path) -> bool:
    from enginehouse import backups

    return backups.is_encrypted(file)


def _run(program: Coroutine[object, object, T], settings: FrontendSettings | WorkerSettings, name: str) -> T:
    """Run a program on uvloop. It logs one line per event to stderr, which `up` redirects to a file; otherwise also to
    a file of its own.
    """
    import uvloop

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
