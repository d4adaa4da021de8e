"""A real terminal for a command: what a person would see and type."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.cli.recorded import WAIT_SECONDS, Recorded, environment

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    def __init__(self, world: Recorded, tmp_path: Path, *arguments: str, columns: int = 120, **variables: str) -> None:
        self._master, slave = pty.openpty()
        self.raw = ""
        self._read_to = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "enginehouse", *arguments],
            env={
                **environment(world, tmp_path),
                **{"TERM": "xterm-256color", "LINES": "40", "COLUMNS": str(columns)},
                **variables,
            },
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(WAIT_SECONDS)
        os.close(self._master)

    @property
    def seen(self) -> str:
        return _ESCAPES.sub("", self.raw)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        os.killpg(self._process.pid, signal.SIGINT)

    def interrupt_at_the_prompt(self) -> int:
        """Ctrl-C until it ends; its exit code. Pressed in the instant between readline's prompt and its waiting, the
        interpreter notices it only at the next key (a bare `input` loses one in six on a busy machine), so a person
        presses again.
        """
        for _ in range(5):
            self.interrupt()
            while self._read(time.monotonic() + 2):
                pass
            if self._process.poll() is not None:
                break
        return self._process.wait(WAIT_SECONDS)

    def wait_for(self, text: str) -> None:
        """Until `text` appears after what was waited for before."""
        deadline = time.monotonic() + WAIT_SECONDS
        while text not in self.seen[self._read_to :]:
            assert self._read(deadline), f"{text!r} did not appear in {self.seen!r}"
        self._read_to = self.seen.index(text, self._read_to) + len(text)

    def exit_code(self) -> int:
        deadline = time.monotonic() + WAIT_SECONDS
        while self._read(deadline):
            pass
        return self._process.wait(WAIT_SECONDS)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            received = os.read(self._master, 65536)
        except OSError:  # Linux's way to say that the other side has closed
            return False
        self.raw += received.decode(errors="replace")
        return bool(received)
