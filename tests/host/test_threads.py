"""Assigned threads: counted once per engine, in turn where that can be had, and never a reason not to start."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from pathlib import Path

import pytest
from tests.host.test_processes import STUBBORN, lines_of

from enginehouse.host import processes, threads

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another user")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory that everybody may write to, as the system's."""
    place = tmp_path / "tmp"
    place.mkdir()
    place.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


async def test_threads_are_counted_once_per_engine_whatever_it_starts(tmp_path: Path) -> None:
    before = threads.assigned()
    environment = {processes.NONCE: "counted", threads.THREADS: "3", "PATH": os.environ["PATH"]}
    process = await processes.spawn(
        [sys.executable, "-u", "-c", STUBBORN], directory=tmp_path, environment=environment, log=tmp_path / "log"
    )
    await lines_of(tmp_path / "log", 1)
    own = {env[processes.NONCE]: env.get(threads.THREADS) for _, env in processes.processes_with_nonce("counted")}
    assert own == {"counted": "3"}
    assert threads.assigned().threads >= 3
    assert threads.assigned().engines >= 1
    await processes.stop_group(process, 0.2)
    assert not list(processes.processes_with_nonce("counted"))
    assert before.threads >= 0


async def test_only_one_worker_of_a_machine_counts_and_starts_at_a_time(temporary: Path) -> None:
    lock = temporary / f"enginehouse-{os.getuid()}" / "threads.lock"
    async with threads.budget(5) as assigned:
        assert assigned.threads >= 0
        with lock.open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with lock.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


async def test_a_lock_that_is_kept_for_long_stops_no_engine(temporary: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with threads.budget(5), threads.budget(0.1) as assigned:
        assert assigned.threads >= 0
    assert "threads.lock_timed_out" in caplog.text


@needs_root
@pytest.mark.parametrize("kind", ["directory", "file", "link", "lock"])
async def test_what_another_user_has_put_in_its_place_stops_no_engine(temporary: Path, kind: str) -> None:
    place = temporary / f"enginehouse-{os.getuid()}"
    if kind == "link":
        place.symlink_to(temporary)
    elif kind == "file":
        place.write_text("")
    else:
        place.mkdir(mode=0o777)
    if kind == "lock":
        (place / "threads.lock").write_text("")
        os.chown(place / "threads.lock", 65534, 65534)
    os.chown(place, 65534, 65534, follow_symlinks=False)
    async with threads.budget(5) as assigned:
        assert assigned.threads >= 0
    # Nothing of ours is where somebody else could get hold of it.
    assert not [path for path in temporary.rglob("*.lock") if path.stat().st_uid == os.getuid()]
