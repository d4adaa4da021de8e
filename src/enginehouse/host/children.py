"""Supervision of child programs: restarted with exponential backoff when they end, stopped in order.

A program is given up only if it refuses to start for a permanent reason, which is passed to the caller. Supervision
does not depend on a terminal: if stderr is closed, the cluster continues. The logs of the programs are kept within a
size limit while they run.
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
from enginehouse.host.program_log import LOG_VARIABLE

STOP_SECONDS = 20.0  # for the graceful stop of one child
PATIENCE_SECONDS = 2.0  # before a message about a slow stop; most stops take a tenth of it
BACKOFF_FIRST_SECONDS = 0.2
BACKOFF_CAP_SECONDS = 10.0
STEADY_SECONDS = 20.0  # a child that ran this long is not in a crash loop, so its backoff is reset
LOG_LIMIT_BYTES = 10 * 1024 * 1024
LOG_LOOK_SECONDS = 5.0  # a program logs at most a few megabytes in this time (`host.log_limit`)
# Exit codes of permanent failures. Others (unreachable, not ready yet) are temporary.
_REFUSALS: dict[int, type[EnginehouseError]] = {1: Hopeless, 2: Invalid}


class ChildProgram(Struct, frozen=True):
    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    inherit: tuple[int, ...] = ()


class Ending:
    """The request to stop, and the request to stop at once.

    The second is accepted only after the message about a slow stop, because one stop may arrive as two signals.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        self._is_told = False

    def ask(self) -> None:
        self.asked.set()

    def interrupt(self) -> None:
        """Handle Ctrl-C: the first is a request to stop; one after the message is a request to stop at once."""
        self.ask()
        if self._is_told:
            self.hurried.set()

    def tell(self, name: str) -> None:
        if not self.hurried.is_set():
            say(f"{name} is still stopping, which may take {STOP_SECONDS:.0f} s; press Ctrl-C to end it at once")
        self._is_told = True


class Child:
    """One supervised program."""

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
        """Run until stopped. If the program cannot start at all, set `refusal` and call `refused`."""
        pause = BACKOFF_FIRST_SECONDS
        try:
            while not self._stopping.is_set():
                started, written = time.monotonic(), _size(self._log)
                try:
                    code = await self._run_once()
                    reason = _last_words(self._log, written)
                except OSError as error:
                    # Out of processes, memory or descriptors, which may be temporary.
                    code, reason = 1, f"cannot start {self.program.name}: {error.strerror or error}"
                if self._stopping.is_set():
                    return
                pause = BACKOFF_FIRST_SECONDS if time.monotonic() - started > STEADY_SECONDS else pause
                if reason and code in _REFUSALS and not self.was_ready:
                    self.refusal = _REFUSALS[code](reason)
                    refused()
                    return
                cause = f": {reason}" if reason else f" with {_described(code)} (log: {self._log})"
                say(f"{self.program.name} ended{cause}; restarting it")
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
            # The program keeps no log of its own, and knows where to read this one.
            environment={**self.program.environment, LOG_VARIABLE: str(self._log)},
            log=self._log,
            inherit=self.program.inherit,
        )
        if self._stopping.is_set():
            # The stop came before the process existed, so `stop` could not end it.
            await processes.stop_group(self._process, STOP_SECONDS)
        return await self._process.wait()

    def retire(self) -> None:
        """Stop restarting the program."""
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
    """Truncate the logs of running programs at their size limit. Runs until cancelled."""
    while True:
        for log in logs:
            # A full disk or a missing log must not end the supervision.
            with contextlib.suppress(OSError):
                await asyncio.to_thread(cut, log)
        await asyncio.sleep(LOG_LOOK_SECONDS)


def cut(log: Path) -> None:
    """Move the content of a log above the limit to NAME.log.1. Programs keep appending to the same file."""
    if _size(log) <= LOG_LIMIT_BYTES:
        return
    try:
        shutil.copyfile(log, log.with_suffix(".log.1"))
    finally:
        # Lines written between copy and truncation are lost; without space for a copy, the whole content is.
        with log.open("r+b") as file:
            file.truncate(0)


def say(text: str) -> None:
    try:
        print(f"enginehouse: {text}", file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def silence(stream: TextIO) -> None:
    """Redirect a stream without a reader to the null device, so that later writes and the final flush do not fail."""
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), stream.fileno())


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _last_words(log: Path, written: int) -> str:
    """The error message with which a child ended, if it logged one after the offset `written`."""
    if _size(log) == written:
        return ""
    last = "".join(processes.last_lines(log))
    return last.removeprefix("enginehouse: ") if last.startswith("enginehouse: cannot ") else ""


def _described(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
