"""Programs that are kept running: started again when they end (backing off), stopped in order.

Only a program that refuses to start at all, with a reason that does not heal by itself, is given up; whoever started it
is told. Nothing here depends on somebody reading what is said: a closed terminal must not end a cluster. What the
programs write to their logs is kept within a limit while they run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from msgspec import Struct

from enginehouse.core.errors import EnginehouseError, Hopeless, Invalid
from enginehouse.host import processes

STOP_SECONDS = 20.0  # for one child to end in order
PATIENCE_SECONDS = 2.0  # for an end that nobody remarks on; most take a tenth of that
BACKOFF_FIRST_SECONDS = 0.2
BACKOFF_CAP_SECONDS = 10.0
STEADY_SECONDS = 20.0  # a child that ran this long is not in a crash loop
LOG_LIMIT_BYTES = 10 * 1024 * 1024
LOG_LOOK_SECONDS = 5.0  # a program of ours writes no more than a few megabytes until then (`host.log_limit`)
# Exit codes of a refusal that trying again does not change; the others (cannot reach, not there yet) may heal.
_REFUSALS: dict[int, type[EnginehouseError]] = {1: Hopeless, 2: Invalid}


class ChildProgram(Struct, frozen=True):
    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    inherit: tuple[int, ...] = ()


class Ending:
    """The request to stop, and the request not to wait for it any longer.

    The second counts only after somebody was told what is waited for: some send a signal twice without meaning more.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        self._is_told = False

    def ask(self) -> None:
        self.asked.set()

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.ask()
        if self._is_told:
            self.hurried.set()

    def tell(self, name: str) -> None:
        if not self.hurried.is_set():
            say(f"{name} is still stopping, which may take {STOP_SECONDS:.0f} s; Ctrl-C ends it at once")
        self._is_told = True


class Child:
    """One program, kept running until told to stop."""

    def __init__(self, program: ChildProgram, directory: Path, log: Path) -> None:
        self.program = program
        self._directory = directory
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self.refusal: EnginehouseError | None = None
        self.was_ready = False

    async def run(self, refused: Callable[[], None]) -> None:
        """`refused` is called when it will never start; `refusal` says why."""
        pause = BACKOFF_FIRST_SECONDS
        try:
            while not self._stopping.is_set():
                started, written = time.monotonic(), _size(self._log)
                try:
                    code = await self._run_once()
                    reason = _last_words(self._log, written)
                except OSError as error:
                    # No process, no memory or no descriptor is left: so it may be again in a moment.
                    code, reason = 1, f"cannot start {self.program.name}: {error.strerror or error}"
                if self._stopping.is_set():
                    return
                pause = BACKOFF_FIRST_SECONDS if time.monotonic() - started > STEADY_SECONDS else pause
                if reason and code in _REFUSALS and not self.was_ready:
                    self.refusal = _REFUSALS[code](reason)
                    refused()
                    return
                told = f": {reason}" if reason else f" with {_described(code)} (log: {self._log})"
                say(f"{self.program.name} ended{told}; starting it again")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._stopping.wait()
                pause = min(BACKOFF_CAP_SECONDS, pause * 2)
        finally:
            self._ended.set()

    async def _run_once(self) -> int:
        self._process = await processes.spawn(
            self.program.argv,
            directory=self._directory,
            environment=self.program.environment,
            log=self._log,
            inherit=self.program.inherit,
        )
        if self._stopping.is_set():
            # Told to stop while there was no process yet: nobody else ends this one.
            await processes.stop_group(self._process, STOP_SECONDS)
        return await self._process.wait()

    def retire(self) -> None:
        """Not started again from now on."""
        self._stopping.set()

    async def stop(self, ending: Ending) -> None:
        self.retire()
        process = self._process
        if process is not None and process.returncode is None:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._hasten(process, ending))
                await processes.stop_group(process, STOP_SECONDS)
                watching.cancel()
        await self._ended.wait()

    async def _hasten(self, process: asyncio.subprocess.Process, ending: Ending) -> None:
        await asyncio.sleep(PATIENCE_SECONDS)
        ending.tell(self.program.name)
        await ending.hurried.wait()
        processes.kill_group(process)


async def keep_short(logs: Sequence[Path]) -> None:
    """Keep logs that programs write to from growing without an end."""
    while True:
        for log in logs:
            # A full disk or a log that somebody moved away is no reason to end what runs.
            with contextlib.suppress(OSError):
                await asyncio.to_thread(cut, log)
        await asyncio.sleep(LOG_LOOK_SECONDS)


def cut(log: Path) -> None:
    """Where a log is beyond the limit, what it holds becomes NAME.log.1. Whoever appends to it goes on doing so."""
    if _size(log) <= LOG_LIMIT_BYTES:
        return
    try:
        shutil.copyfile(log, log.with_suffix(".log.1"))
    finally:
        # What is written between the two is lost, and all of it where there is no room for a copy.
        with log.open("r+b") as file:
            file.truncate(0)


def say(text: str) -> None:
    try:
        print(f"enginehouse: {text}", file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def silence(stream: TextIO) -> None:
    """Nobody reads it any more: what else is written to it goes nowhere, instead of being an error at every turn, the
    last one at the end of the program.
    """
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _last_words(log: Path, written: int) -> str:
    """The sentence with which a child of ours refused, if it said one since `written`."""
    if _size(log) == written:
        return ""
    last = "".join(processes.last_lines(log))
    return last.removeprefix("enginehouse: ") if last.startswith("enginehouse: cannot ") else ""


def _described(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
