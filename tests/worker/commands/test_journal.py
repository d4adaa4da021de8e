"""The journal: remembers across a kill at any byte, refuses what is older."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginehouse.core.errors import Conflict
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.intent import Outcome
from enginehouse.core.report import CommandResult
from enginehouse.core.wire import Command
from enginehouse.worker.commands import journal as journal_module
from enginehouse.worker.commands.journal import Journal


def command(generation: int = 1, fence: int = 1, intent: str = "i", attempt: int = 1) -> Command:
    return Command(intent=IntentId(intent), generation=generation, attempt=attempt, fence=fence)


def result(intent: str, attempt: int = 1) -> CommandResult:
    return CommandResult(intent=IntentId(intent), attempt=attempt, outcome=Outcome(digest=intent))


def loaded(directory: Path) -> Journal:
    journal = Journal(directory)
    journal.load()
    return journal


async def test_results_and_fences_survive_a_restart(tmp_path: Path) -> None:
    journal = loaded(tmp_path)
    await journal.accept("backend:a", command(generation=4, fence=2))
    await journal.record(result("i"))
    again = loaded(tmp_path)
    assert again.result_of(IntentId("i"), 1) == Outcome(digest="i")
    assert again.result_of(IntentId("i"), 2) is None
    with pytest.raises(Conflict):
        again.check("backend:a", command(generation=4, fence=1))
    again.check("backend:b", command(generation=1, fence=1))


@pytest.mark.parametrize(
    ("generation", "fence", "is_taken"), [(3, 9, False), (4, 1, False), (4, 2, True), (4, 3, True), (5, 1, True)]
)
async def test_a_newer_generation_counts_more_than_any_fence(
    tmp_path: Path, generation: int, fence: int, is_taken: bool
) -> None:
    journal = loaded(tmp_path)
    await journal.accept("backend:a", command(generation=4, fence=2))
    if is_taken:
        await journal.accept("backend:a", command(generation=generation, fence=fence))
    else:
        with pytest.raises(Conflict):
            await journal.accept("backend:a", command(generation=generation, fence=fence))


async def test_a_kill_at_any_byte_loses_at_most_the_line_being_written(tmp_path: Path) -> None:
    journal = loaded(tmp_path)
    await journal.accept("backend:a", command(generation=1, fence=1))
    await journal.record(result("first"))
    file = tmp_path / "journal.jsonl"
    whole = len(file.read_bytes())
    await journal.record(result("second"))
    content = file.read_bytes()
    for length in range(whole, len(content) + 1):
        place = tmp_path / str(length)
        place.mkdir()
        (place / "journal.jsonl").write_bytes(content[:length])
        torn = loaded(place)
        assert torn.result_of(IntentId("first"), 1) is not None
        assert (torn.result_of(IntentId("second"), 1) is not None) == (length == len(content))
        # And what comes after the torn line is not lost in it.
        await torn.record(result("third"))
        assert loaded(place).result_of(IntentId("third"), 1) is not None


async def test_it_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "REWRITE_AFTER", 30)
    journal = loaded(tmp_path)
    for number in range(journal_module.KEPT_RESULTS + 50):
        await journal.record(result(str(number)))
    assert len(journal.results()) == journal_module.KEPT_RESULTS
    lines = (tmp_path / "journal.jsonl").read_bytes().count(b"\n")
    assert lines <= journal_module.KEPT_RESULTS + 31
    assert loaded(tmp_path).results() == journal.results()


async def test_another_house_counts_from_one_again(tmp_path: Path) -> None:
    """Generations are those of one node in one database: a worker that joins another one must not refuse its first."""
    journal = loaded(tmp_path)
    await journal.belong_to(NodeId("node-a"))
    await journal.accept("backend:a", command(generation=7, fence=3))
    await journal.record(result("i"))
    assert not await journal.belong_to(NodeId("node-a"))
    assert await loaded(tmp_path).belong_to(NodeId("node-b"))
    again = loaded(tmp_path)
    assert again.results() == ()
    await again.accept("backend:a", command(generation=1, fence=1))
    await again.accept("backend:a", command(generation=2, fence=1))
    with pytest.raises(Conflict):
        loaded(tmp_path).check("backend:a", command(generation=1, fence=9))


async def test_reading_it_writes_nothing_so_that_a_full_disk_keeps_no_worker_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = loaded(tmp_path)
    for number in range(5):
        await journal.record(result(str(number)))
    file = tmp_path / "journal.jsonl"
    before, content = file.stat().st_ino, file.read_bytes()
    assert loaded(tmp_path).results() == journal.results()
    assert (file.stat().st_ino, file.read_bytes()) == (before, content)
    # A torn end is cut off, which takes no room.
    file.write_bytes(content + b'{"result"')
    assert loaded(tmp_path).results() == journal.results()
    assert (file.stat().st_ino, file.read_bytes()) == (before, content)
    # And what was read counts for the next time that it is written anew.
    monkeypatch.setattr(journal_module, "REWRITE_AFTER", 5)
    await loaded(tmp_path).record(result("next"))
    assert file.stat().st_ino != before
