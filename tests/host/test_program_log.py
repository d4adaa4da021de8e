"""The log file of a program: within its limit, continued backwards, without secrets, and never a reason to stop."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest

from enginehouse.core.log_line import REDACTED
from enginehouse.host import program_log
from enginehouse.host.program_log import LOG_VARIABLE, LimitedFile, LogTail, keep_own_log, log_path


def texts(tail: LogTail, count: int = 100) -> list[str]:
    return [line.text for line in tail.last(count)]


def test_at_its_limit_a_new_file_begins_and_the_one_before_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    file = LimitedFile(path, limit_bytes=50)
    for number in range(20):
        file.write(f"line {number:04}\n")
    assert path.stat().st_size <= 60
    assert path.with_suffix(".log.1").stat().st_size <= 60
    assert stat.S_IMODE(path.with_suffix(".log.1").stat().st_mode) == 0o600
    assert sorted(one.name for one in tmp_path.iterdir()) == ["worker.log", "worker.log.1"]
    assert texts(LogTail(path, "worker"), 6) == [f"line {number:04}" for number in range(14, 20)]


def test_what_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    file = LimitedFile(tmp_path / "missing" / "worker.log")
    assert file.write("lost\n") == 5
    (tmp_path / "missing").mkdir()
    file.write("kept\n")
    assert (tmp_path / "missing" / "worker.log").read_text() == "kept\n"


def test_a_reader_sees_the_last_lines_then_what_is_added_also_in_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "frontend.log"
    path.write_text("one\ntwo\nhal")
    tail = LogTail(path, "frontend")
    assert texts(tail, 1) == ["two"]
    assert tail.added() == []
    with path.open("a") as file:
        file.write("f\nlast\n")
    assert [line.text for line in tail.added()] == ["half", "last"]
    path.write_text("new\n")
    assert [line.text for line in tail.added()] == ["new"]
    path.unlink()
    assert tail.added() == []


def test_a_long_log_is_read_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_log, "READ_BYTES", 100)
    path = tmp_path / "frontend.log"
    path.write_text("".join(f"line {number:04}\n" for number in range(1000)))
    found = texts(LogTail(path, "frontend"))
    assert found[-1] == "line 0999"
    assert all(len(text) == 9 for text in found), "no half of a line"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("2026-01-01T12:00:00 INFO enginehouse.x node.joined name=a", "INFO enginehouse.x node.joined name=a"),
        ("[12345] 2026/01/01 12:00:00.123456 [INF] Server is ready", "[INF] Server is ready"),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
    ],
)
def test_times_of_both_kinds_of_programs_become_one_form(tmp_path: Path, line: str, text: str) -> None:
    path = tmp_path / "x.log"
    path.write_text(f"2026-01-01T12:00:00 INFO first\n{line}\n")
    found = LogTail(path, "x").last(1)[0]
    assert found.text == text
    assert found.timestamp.endswith("Z")


def test_secrets_are_left_out_those_given_and_those_that_look_like_one(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    own = "eh-admin-" + "x" * 43
    path.write_text(f"a the-join-token b\nc {own} d\ne postgresql://u:pass@h f\n")
    found = " ".join(texts(LogTail(path, "x", ("the-join-token",))))
    assert found == f"a {REDACTED} b c {REDACTED} d e postgresql://u:{REDACTED}@h f"


def test_under_a_parent_that_keeps_its_log_it_writes_none_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    assert log_path(tmp_path, "worker") == tmp_path / "worker.log"
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "kept.log"))
    keep_own_log(tmp_path, "worker")
    assert root.handlers == []
    assert log_path(tmp_path, "worker") == tmp_path / "kept.log"
    monkeypatch.delenv(LOG_VARIABLE)
    keep_own_log(tmp_path, "worker")
    logging.getLogger("enginehouse.test").warning("something.happened")
    assert "something.happened" in (tmp_path / "worker.log").read_text()
