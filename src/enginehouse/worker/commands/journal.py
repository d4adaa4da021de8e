"""The durable memory of this worker: the newest generation and fence per subject, and the last results.

The journal belongs to one node of one cluster. Another cluster, or one that lost its database, counts from one again,
so the journal is cleared when the node's ID changes.

It is a file of JSON lines. Each line is appended and synced before the step that relies on it; a grown file is
rewritten as a whole. A kill at any byte loses at most the line that is being written.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections import OrderedDict
from pathlib import Path

import msgspec
from msgspec import Struct

from enginehouse.core.errors import Conflict
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.intent import Outcome
from enginehouse.core.report import CommandResult
from enginehouse.core.wire import Command
from enginehouse.host import disk
from enginehouse.host.blocking import in_thread

log = logging.getLogger(__name__)

KEPT_RESULTS = 200  # every report carries all; after a longer outage a frontend sends again, which is harmless
KEPT_SUBJECTS = 5000  # far more than a node has backends, models and replicas
REWRITE_AFTER = 1000  # appended lines: keeps the file small at the cost of few rewrites


class _Line(Struct, frozen=True, omit_defaults=True, kw_only=True):
    node: NodeId = NodeId("")  # the following lines belong to this node, the preceding ones to another
    subject: str = ""
    generation: int = 0
    fence: int = 0
    result: CommandResult | None = None


class Journal:
    """Call `accept` before a command and `record` after it. Every change is synced when the call returns."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "journal.jsonl"
        self.node_id = NodeId("")
        self._seen: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._results: OrderedDict[tuple[IntentId, int], CommandResult] = OrderedDict()
        self._appended = 0
        self._writing = asyncio.Lock()

    def load(self) -> None:
        """Read the journal of an earlier run and truncate an incomplete last line. Blocks.

        Nothing is written, so that a worker can start on a full disk.
        """
        try:
            content = self._read()
        except FileNotFoundError:
            return
        whole, end, torn = content.rpartition(b"\n")
        if torn:
            log.warning("journal.end_cut bytes=%d", len(torn))
            self._truncate(len(whole) + len(end))
        for number, text in enumerate(whole.split(b"\n") if whole else ()):
            try:
                self._take(msgspec.json.decode(text, type=_Line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                log.warning("journal.line_dropped line=%d", number + 1)
            self._appended += 1

    async def belong_to(self, node_id: NodeId) -> bool:
        """Set the node's ID, and return whether it changed; a change clears the journal."""
        if node_id == self.node_id:
            return False
        await self._append(_Line(node=node_id))
        return True

    def results(self) -> tuple[CommandResult, ...]:
        return tuple(self._results.values())

    def result_of(self, intent: IntentId, attempt: int) -> Outcome | None:
        found = self._results.get((intent, attempt))
        return found.outcome if found else None

    def check(self, subject: str, command: Command) -> None:
        """Raise `Conflict` for a command that is older than one already seen for its subject.

        The generation is compared first: a newer generation is another intent, and fences only grow within an intent.
        """
        seen = self._seen.get(subject, (0, 0))
        if (command.generation, command.fence) < seen:
            raise Conflict(
                f"cannot take a command for {subject} with generation {command.generation} and fence {command.fence}: "
                f"a command with {seen[0]} and {seen[1]} was already taken",
                code="conflict",
            )

    async def accept(self, subject: str, command: Command) -> None:
        """`check` a command and record its generation and fence."""
        self.check(subject, command)
        pair = (command.generation, command.fence)
        if self._seen.get(subject) != pair:
            await self._append(_Line(subject=subject, generation=pair[0], fence=pair[1]))

    def generation_of(self, subject: str) -> int:
        """The newest generation seen for a subject; 0 if there is none."""
        return self._seen.get(subject, (0, 0))[0]

    async def record(self, result: CommandResult) -> None:
        await self._append(_Line(result=result))

    def _take(self, line: _Line) -> None:
        if line.node and line.node != self.node_id:
            self.node_id = line.node
            self._seen.clear()
            self._results.clear()
        if line.result is not None:
            self._results[(line.result.intent, line.result.attempt)] = line.result
            while len(self._results) > KEPT_RESULTS:
                self._results.popitem(last=False)
        if line.subject:
            self._seen[line.subject] = max((line.generation, line.fence), self._seen.get(line.subject, (0, 0)))
            self._seen.move_to_end(line.subject)
            while len(self._seen) > KEPT_SUBJECTS:
                self._seen.popitem(last=False)

    async def _append(self, line: _Line) -> None:
        try:
            async with self._writing:
                self._take(line)
                if self._appended >= REWRITE_AFTER:
                    await in_thread(self._rewrite)
                else:
                    self._appended += 1
                    await in_thread(self._write, msgspec.json.encode(line) + b"\n")
        except OSError as error:
            raise disk.storage_error(error, "write the journal of this worker") from error

    def _write(self, content: bytes) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            before = os.fstat(descriptor).st_size
            if os.write(descriptor, content) < len(content):
                # A full disk took part of a line. It is removed, because the next line would be appended to it.
                os.ftruncate(descriptor, before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _rewrite(self) -> None:
        lines = [_Line(node=self.node_id)] if self.node_id else []
        lines += [_Line(subject=subject, generation=pair[0], fence=pair[1]) for subject, pair in self._seen.items()]
        lines += [_Line(result=result) for result in self._results.values()]
        self._replace(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    # The file -------------------------------------------------------------------------------------

    def _read(self) -> bytes:
        return self._path.read_bytes()

    def _truncate(self, length: int) -> None:
        os.truncate(self._path, length)

    def _replace(self, content: bytes) -> None:
        disk.write_atomic(self._path, content, mode=0o600)
        self._appended = 0
