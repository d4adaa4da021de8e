"""The machine stops, or its disk refuses, between the swap and the end of the sync: the old version is put back whole.

A new tree is in place before it is on disk, so after a power cut it may have holes. Here the process is killed there
and the record is given the id of another run of the machine; the files are given holes too, so that a new tree that is
taken for whole would be found out.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.worker.backends.test_crashes import Start, traced, versions, whole
from tests.worker.forks import Forks, Job, forks, options
from tests.worker.shelf import DIRECTORY, Shelf, launcher, noise, said_by, tree_of, write_metadata
from tests.worker.world import nothing, silent

from enginehouse.build_worker import make_installation
from enginehouse.core.backend import Resolved
from enginehouse.core.installation import METADATA_FILE, InstallRecord, Version
from enginehouse.host import disk
from enginehouse.worker.backends.installer import InstallRequest
from enginehouse.worker.backends.swap import Swap
from enginehouse.worker.backends.trees import Trees

__all__ = ["versions"]
POSITIONS = ("recorded", "exchanged", "swapped", "pointed")
NEW, OLD, OLDER = "new", "old", "older"


@pytest.fixture(scope="module")
async def forked() -> AsyncIterator[Forks]:
    async with forks() as made:
        yield made


@pytest.fixture
async def start(tmp_path: Path, versions: dict[str, Resolved]) -> Start:
    made = Start(tmp_path, versions)
    await made.make()
    return made


class Bench:
    """An install of `engine` by its steps, in a directory of its own."""

    def __init__(self, backends: Path, *, has_old: bool, pointer_before: str = "") -> None:
        self.trees = Trees(backends)
        self.swap = Swap(self.trees)
        self.trees.make_directories()
        self._make(self.trees.previous_of(DIRECTORY), OLDER)
        if has_old:
            self._make(self.tree, OLD)
        if pointer_before:
            write_metadata(self.pointer, name="named", meta_backend_for=pointer_before, version="before")
        self._make(self.trees.staging_of(DIRECTORY), NEW)
        self._resolved = Resolved(directory=DIRECTORY, uri="", digest="", meta="named", version=NEW)
        self.before = self.seen()

    @property
    def tree(self) -> Path:
        return self.trees.path_of(DIRECTORY)

    @property
    def pointer(self) -> Path:
        return self.trees.path_of("named")

    def seen(self) -> tuple[object, ...]:
        """Everything that an install changes, but for what it is built in."""
        previous = self.trees.previous_of(DIRECTORY)
        return (
            tree_of(self.tree) if self.tree.exists() else None,
            self.trees.metadata_of(DIRECTORY),
            tree_of(previous),
            self.trees.pointers.known("named"),
        )

    def come_to(self, position: str) -> None:
        inode = self.trees.staging_of(DIRECTORY).stat().st_ino
        self.trees.reach_staged(DIRECTORY, Version(inode=inode, digest=NEW), self._resolved)
        if position == "exchanged" and self.tree.exists():
            assert disk.exchange(self.trees.staging_of(DIRECTORY), self.tree)
        elif position != "recorded":
            self.swap.swap_in(DIRECTORY)
        if position == "pointed":
            self.trees.pointers.point(self._resolved)

    def cut_the_power(self) -> None:
        record = self.trees.record(DIRECTORY)
        self.trees.write_record(DIRECTORY, msgspec.structs.replace(record, boot_id="another"))
        for place in (self.tree, self.trees.staging_of(DIRECTORY)):
            if place.exists() and place.stat().st_ino == record.attempt_inode:
                os.truncate(place / "engine.so", 0)

    def recover(self) -> InstallRecord:
        self.swap.recover()
        for place in ("staging", "replaced"):
            assert not list((self.trees.private / place).iterdir())
        return self.trees.record(DIRECTORY)

    def _make(self, path: Path, version: str) -> None:
        path.mkdir(parents=True)
        (path / "run.sh").write_bytes(launcher(version))
        (path / "run.sh").chmod(0o750)
        (path / "engine.so").write_bytes(version.encode() * 1000)
        (path / METADATA_FILE).write_text(f'{{"version": "{version}", "generation": {len(version)}}}')


@pytest.mark.parametrize("pointer_before", ["", DIRECTORY, "elsewhere"])
@pytest.mark.parametrize("has_old", [True, False])
@pytest.mark.parametrize("position", POSITIONS)
def test_a_power_cut_before_the_sync_gives_the_old_version_back(
    tmp_path: Path, position: str, has_old: bool, pointer_before: str
) -> None:
    bench = Bench(tmp_path, has_old=has_old, pointer_before=pointer_before)
    bench.come_to(position)
    bench.cut_the_power()
    record = bench.recover()
    if position == "pointed" and not has_old and pointer_before == DIRECTORY:
        # It led nowhere before, and now it would again.
        assert not bench.pointer.exists()
        bench.before = (*bench.before[:-1], None)
    assert bench.seen() == bench.before
    assert bench.pointer.exists() == (bench.before[-1] is not None)
    assert (record.step, record.attempt_inode, record.boot_id) == ("cleaned", 0, "")
    bench.recover()
    assert bench.seen() == bench.before


@pytest.mark.parametrize("has_old", [True, False])
@pytest.mark.parametrize("position", POSITIONS)
def test_a_kill_before_the_sync_is_synced_and_finished_while_the_machine_runs(
    tmp_path: Path, position: str, has_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(disk, "sync_files", synced.append)
    bench = Bench(tmp_path, has_old=has_old)
    bench.come_to(position)
    assert bench.recover().step == "cleaned"
    if position == "recorded":
        assert bench.seen() == bench.before
        assert synced == []
        return
    assert said_by(bench.tree) == NEW
    assert said_by(bench.trees.previous_of(DIRECTORY)) == (OLD if has_old else OLDER)
    known = bench.trees.pointers.known("named")
    assert known is not None
    assert (known.meta_backend_for, known.version) == (DIRECTORY, NEW)
    assert synced == [bench.tree]


@pytest.mark.parametrize("has_old", [True, False])
def test_a_power_cut_after_the_sync_keeps_the_new_version(tmp_path: Path, has_old: bool) -> None:
    bench = Bench(tmp_path, has_old=has_old)
    bench.come_to("pointed")
    bench.trees.reach(DIRECTORY, "swapped")
    assert bench.trees.record(DIRECTORY).boot_id == ""
    assert bench.recover().step == "cleaned"
    assert said_by(bench.tree) == NEW
    assert said_by(bench.trees.previous_of(DIRECTORY)) == (OLD if has_old else OLDER)


def test_a_machine_that_cannot_tell_its_runs_apart_syncs_before_the_swap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(disk, "sync_files", synced.append)
    monkeypatch.setattr(disk, "_BOOT_ID", tmp_path / "absent")
    bench = Bench(tmp_path / "backends", has_old=True)
    bench.come_to("recorded")
    assert synced == [bench.trees.staging_of(DIRECTORY)]
    bench.swap.swap_in(DIRECTORY)
    assert bench.recover().step == "cleaned"
    assert said_by(bench.tree) == NEW
    assert len(synced) == 1


class Killed(BaseException):
    """Stands for a kill: nothing after it runs."""


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("has_old", [True, False])
@pytest.mark.parametrize("position", POSITIONS)
def test_undoing_can_be_killed_at_any_step_and_is_done_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, position: str, has_old: bool, can_exchange: bool
) -> None:
    count = killed = 0

    def counted(step: str, allowed: int) -> None:
        nonlocal count
        if count == allowed:
            raise Killed(step)
        count += 1

    rename, exchange, remove, write = Path.rename, disk.exchange, disk.remove_tree, disk.write_atomic
    for allowed in range(20):
        bench = Bench(tmp_path / str(allowed), has_old=has_old)
        bench.come_to(position)
        bench.cut_the_power()
        count = 0

        def stepped_rename(path: Path, target: Path, allowed: int = allowed) -> Path:
            counted("rename", allowed)
            return rename(path, target)

        def stepped_exchange(first: Path, second: Path, allowed: int = allowed) -> bool:
            counted("exchange", allowed)
            return can_exchange and exchange(first, second)

        def stepped_remove(path: Path, allowed: int = allowed) -> None:
            counted("remove", allowed)
            remove(path)

        def stepped_write(path: Path, content: bytes, mode: int = 0o644, allowed: int = allowed) -> None:
            counted("write", allowed)
            write(path, content, mode)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", stepped_rename)
            patched.setattr(disk, "exchange", stepped_exchange)
            patched.setattr(disk, "remove_tree", stepped_remove)
            patched.setattr(disk, "write_atomic", stepped_write)
            try:
                bench.swap.recover()
                is_done = True
            except Killed:
                is_done = False
        assert bench.recover().step == "cleaned"
        assert bench.seen() == bench.before
        assert not bench.pointer.exists()
        if is_done:
            break
        killed += 1
    assert killed >= 2
    assert is_done


async def test_a_real_install_that_was_cut_off_in_its_sync_is_undone_and_can_be_done_again(
    forked: Forks, start: Start
) -> None:
    start.fresh()
    job = Job(backends=str(start.backends), resolved=start.versions["v2"])
    kill = ["-o", "/dev/null", "-e", "trace=syncfs", "-e", "inject=syncfs:signal=KILL:when=1"]
    assert await traced(forked, job, kill) == -signal.SIGKILL
    # In place and usable, but not on disk.
    assert said_by(start.backends / DIRECTORY) == "v2"
    trees = Trees(start.backends)
    assert said_by(trees.replaced_of(DIRECTORY)) == "v1"
    assert said_by(trees.previous_of(DIRECTORY)) == "v0"
    assert trees.record(DIRECTORY).boot_id == disk.boot_id() != ""
    cut = msgspec.structs.replace(trees.record(DIRECTORY), boot_id="another")
    trees.write_record(DIRECTORY, cut)
    os.truncate(start.backends / DIRECTORY / "lib" / "a.so", 0)
    assembled = start.recovered()
    assert whole(start, assembled) == "v1"
    assert not (start.backends / "named").exists()
    await assembled.close()
    assert await traced(forked, job, ["-o", "/dev/null", "-e", "trace=syncfs"]) == 0
    assembled = start.recovered()
    assert whole(start, assembled) == "v2"
    await assembled.close()


@pytest.mark.parametrize("boot_id", ["", "another"])
async def test_an_install_settles_the_one_before_it_even_where_nothing_is_left_to_do(
    forked: Forks, start: Start, boot_id: str
) -> None:
    start.fresh()
    wanted = start.versions["v2"]
    kill = ["-o", "/dev/null", "-e", "trace=syncfs", "-e", "inject=syncfs:signal=KILL:when=1"]
    assert await traced(forked, Job(backends=str(start.backends), resolved=wanted), kill) == -signal.SIGKILL
    assembled = make_installation(options(start.backends), os.environ)
    record = assembled.trees.record(DIRECTORY)
    assembled.trees.write_record(DIRECTORY, msgspec.structs.replace(record, boot_id=boot_id or record.boot_id))
    installed = await assembled.installer.install(InstallRequest(resolved=wanted), silent, nothing)
    assert installed.changed == (boot_id == "another")
    assert whole(start, assembled) == "v2"
    assert assembled.trees.record(DIRECTORY).step == "cleaned"
    await assembled.close()


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
async def test_a_sync_that_fails_fails_the_install_and_puts_the_old_version_back(
    forked: Forks, start: Start, error: str
) -> None:
    start.fresh()
    job = Job(backends=str(start.backends), resolved=start.versions["v2"])
    # Once: the second time a disk says that all is well, though what it lost is lost.
    fail = ["-o", "/dev/null", "-e", "trace=syncfs", "-e", f"inject=syncfs:error={error}:when=1"]
    assert await traced(forked, job, fail) == 1
    trees = Trees(start.backends)
    # Nobody has recovered anything yet.
    assert tree_of(start.backends / DIRECTORY) == start.trees["v1"]
    assert tree_of(trees.previous_of(DIRECTORY)) == start.trees["v0"]
    assert not (start.backends / "named").exists()
    assert trees.record(DIRECTORY).step == "cleaned"
    assert not [path for place in ("staging", "replaced") for path in (trees.private / place).iterdir()]


async def test_an_install_that_fails_for_an_io_error_has_put_the_old_version_back(forked: Forks, start: Start) -> None:
    """Each fsync of an install fails once: then it is undone, or it was not needed for what success promises."""
    job = Job(backends=str(start.backends), resolved=start.versions["v2"])
    failed = passed = 0
    for number in range(1, 60):
        start.fresh()
        trace = start.backends.parent / "fsyncs"
        fail = ["-o", str(trace), "-e", "trace=fsync", "-e", f"inject=fsync:error=EIO:when={number}"]
        code = await traced(forked, job, fail)
        if "INJECTED" not in trace.read_text():
            break
        assert code in (0, 1), number
        wanted = "v2" if code == 0 else "v1"
        assert tree_of(start.backends / DIRECTORY) == start.trees[wanted], f"fsync {number}, exit code {code}"
        trees = Trees(start.backends)
        assert [one.digest for one in trees.list_installed() if one.name == DIRECTORY and not one.is_unsettled] == [
            start.versions[wanted].digest
        ]
        failed, passed = failed + code, passed + 1 - code
    assert failed >= 3
    assert passed <= 3, "what is refused after the new version is on disk is done the next time"


async def test_a_kill_while_a_failed_sync_is_undone_never_ends_with_the_new_version(
    forked: Forks, start: Start
) -> None:
    job = Job(backends=str(start.backends), resolved=start.versions["v2"])
    for number in range(1, 20):
        start.fresh()
        arguments = ["-o", "/dev/null", "-e", "trace=syncfs,renameat2"]
        arguments += ["-e", "inject=syncfs:error=EIO:when=1", "-e", f"inject=renameat2:signal=KILL:when={number}"]
        code = await traced(forked, job, arguments)
        assembled = start.recovered()
        assert whole(start, assembled) == "v1"
        await assembled.close()
        if code == 1:
            break
    assert number == 3  # the exchange, and the one back


async def test_another_backend_shares_no_file_with_a_tree_that_is_not_synced(one: Shelf) -> None:
    library = {"lib/large.so": noise(2_000_000, 5), "lib/small.so": noise(50_000, 6)}
    await one.publish("engine:1", [library | {"run.sh": launcher("one")}])
    await one.publish("other:1", [library | {"run.sh": launcher("other")}])
    shared: list[int] = []

    async def swapped() -> None:
        for name in ("other", "another"):
            request = one.request("other:1", directory=name)
            shared.append((await one.assembled.installer.install(request, one.report, nothing)).shared_bytes)

    await one.assembled.installer.install(one.request("engine:1"), one.report, swapped)
    # Nothing of the tree that is being synced; all of the one beside it, which is.
    assert shared == [0, 2_050_000]
    assert not os.path.samefile(one.tree / "lib" / "large.so", one.backends / "other" / "lib" / "large.so")
