"""The log file of a program: written with a size limit, and read again for an operator who is elsewhere.

A program whose output already goes to a file that its parent keeps short is told so by a variable; any other writes its
own file beside what it prints. A log that cannot be written must not stop the program: its output has every line too.
All functions block, and reading a log is bounded, however long it is.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path

from enginehouse.core.log_line import MAX_LINE, LogLine, redacted
from enginehouse.host.log_limit import LimitedHandler

LOG_VARIABLE = "ENGINEHOUSE_LOG_FILE"
FORMAT, TIME_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S"
OWN_LIMIT_BYTES = 10 * 1024 * 1024  # of the file; the one before is kept too
READ_BYTES = 1024 * 1024  # of one look; more is skipped, and the lines say so
# Ours begin with an ISO time, those of nats-server with `[PID] DATE TIME`.
_TIME = re.compile(r"(?:\[\d+\] )?(\d{4})[-/](\d\d)[-/](\d\d)[T ](\d\d:\d\d:\d\d)(?:\.\d+)?\s+(?:(?:UTC)\s+)?")


def log_path(data: Path, program: str) -> Path:
    """The file that has the log of this program."""
    return Path(os.environ.get(LOG_VARIABLE) or data / f"{program}.log")


def keep_own_log(data: Path, program: str) -> None:
    """Log into a file too, unless the output goes to one already."""
    if os.environ.get(LOG_VARIABLE):
        return
    handler = LimitedHandler(LimitedFile(data / f"{program}.log"))  # type: ignore[arg-type]  # only written to
    handler.setFormatter(logging.Formatter(FORMAT, TIME_FORMAT))
    logging.getLogger().addHandler(handler)


class LimitedFile(io.TextIOBase):
    """A text file that is appended to. At its limit it becomes NAME.log.1, and a new one begins."""

    def __init__(self, path: Path, limit_bytes: int = OWN_LIMIT_BYTES) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._file: io.BufferedWriter | None = None

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        # Opened at the first line: before that the data directory may not exist.
        with contextlib.suppress(OSError):
            if self._file is None:
                descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
                self._file = open(descriptor, "ab")  # noqa: SIM115  # lives as long as the program
            self._file.write(text.encode(errors="backslashreplace"))
            self._file.flush()
            if self._file.tell() > self._limit_bytes:
                self._path.replace(self._path.with_suffix(".log.1"))
                self.close()
        return len(text)

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


class LogTail:
    """Reads the end of a log, then what is added to it. One reader."""

    def __init__(self, path: Path, stream: str, secrets: Collection[str] = ()) -> None:
        self._path = path
        self._stream = stream
        self._secrets = tuple(one for one in secrets if one)
        self._position = 0
        self._rest = b""
        self._timestamp = ""

    @property
    def exists(self) -> bool:
        return self._path.is_file()

    def last(self, count: int) -> list[LogLine]:
        """The last lines; a log that has just begun anew is continued backwards in the one before."""
        found = self.added()
        if len(found) < count:
            earlier = LogTail(self._path.with_suffix(".log.1"), self._stream, self._secrets).added()
            found = [*earlier, *found]
        return found[-count:] if count > 0 else []

    def added(self) -> list[LogLine]:
        """What was added since the last look."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size < self._position:
                    self._position, self._rest = 0, b""  # begun anew
                if size - self._position > READ_BYTES:
                    self._position, self._rest = size - READ_BYTES, b""
                    file.seek(self._position)
                    self._position += len(file.readline())  # half of a line
                file.seek(self._position)
                content = file.read(READ_BYTES)
        except OSError:
            return []  # not made yet, or removed
        self._position += len(content)
        *whole, self._rest = (self._rest + content).split(b"\n")
        return [self._line(line.decode("utf-8", "replace").rstrip("\r")) for line in whole]

    def _line(self, text: str) -> LogLine:
        found = _TIME.match(text)
        if found:
            local = datetime.fromisoformat(f"{found[1]}-{found[2]}-{found[3]}T{found[4]}").astimezone(UTC)
            self._timestamp = local.isoformat().replace("+00:00", "Z")
        shown = text[found.end() :] if found else text
        return LogLine(self._timestamp, self._stream, redacted(shown, self._secrets)[:MAX_LINE])
