"""Killed at any call and at any byte: afterwards the complete old or the complete new version, and no byte too many.

A quick part always runs; `ENGINEHOUSE_PROOF=1` makes it whole.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from tests.fetch.images import write_image
from tests.worker.forks import Forks, Job, forks, options
from tests.worker.shelf import DIRECTORY, Shelf, Tree, launcher, noise, said_by, tree_of
from tests.worker.world import nothing, silent, until

from enginehouse.artifact.blobs.partial import PART_BYTES
from enginehouse.build_worker import make_installation
from enginehouse.core.backend import Resolved
from enginehouse.host import hardware
from enginehouse.worker.backends.installation import Installation
from enginehouse.worker.backends.installer import InstallRequest

IS_PROOF = bool(os.environ.get("ENGINEHOUSE_PROOF"))
CALLS = (
    "rename,renameat,renameat2,fsync,fdatasync,syncfs,unlink,unlinkat,rmdir,mkdir,mkdirat,symlink,symlinkat,link,linkat,"
    "write,pwrite64,pwritev,fchmod,ftruncate"
)
_PREVIOUS = {"v1": "v0", "v2": "v1", "v0": "v1"}


@pytest.fixture(scope="module")
async def forked() -> AsyncIterator[Forks]:
    async with forks() as made:
        yield made


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Resolved]:
    """Three versions in layouts on disk; the last one comes with a meta name."""
    found = {}
    for number, name in enumerate(("v0", "v1", "v2")):
        files = {"run.sh": launcher(name), "lib/a.so": noise(5000, number), "lib/shared.so": noise(6000, 9)}
        image = write_image(tmp_path_factory.mktemp(name), [files], platform=hardware.platform())
        uri = f"ocifile://{image.directory}"
        found[name] = Resolved(directory=DIRECTORY, uri=uri, digest=image.digest, meta="named" if name == "v2" else "")
    return found


class Start:
    """A directory with v1 installed and v0 before it, to begin from as often as needed."""

    def __init__(self, directory: Path, versions: dict[str, Resolved]) -> None:
        self._origin = directory / "origin"
        self.backends = directory / "backends"
        self.versions = versions
        self.trees: dict[str, Tree] = {}

    async def make(self) -> None:
        for name in ("v0", "v1", "v2"):
            place = self._origin if name != "v2" else self._origin.with_name("aside")
            assembled = make_installation(options(place), os.environ)
            await assembled.installer.install(InstallRequest(resolved=self.versions[name]), silent, nothing)
            self.trees[name] = tree_of(place / DIRECTORY)
            await assembled.close()

    def fresh(self) -> Path:
        shutil.rmtree(self.backends, ignore_errors=True)
        shutil.copytree(self._origin, self.backends, symlinks=True)
        return self.backends

    def recovered(self) -> Installation:
        assembled = make_installation(options(self.backends), os.environ)
        assembled.installer.recover()
        return assembled


@pytest.fixture
async def start(tmp_path: Path, versions: dict[str, Resolved]) -> Start:
    made = Start(tmp_path, versions)
    await made.make()
    return made


async def traced(forked: Forks, job: Job, arguments: list[str]) -> int:
    """The exit code of a job whose thread for the disk was under strace."""
    _, thread = await forked.prepare(job)
    tracer = await asyncio.create_subprocess_exec(
        "strace", *arguments, "-p", str(thread), stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    assert tracer.stderr is not None
    attached = await asyncio.wait_for(tracer.stderr.readline(), 20)
    assert b"attached" in attached, attached
    code = await forked.go()
    await tracer.communicate()
    return code


async def calls_of(forked: Forks, job: Job, log: Path) -> list[tuple[str, int]]:
    """Every call that changes the disk, and the how manieth of its name it is: that is how strace counts."""
    assert await traced(forked, job, ["-o", str(log), "-e", f"trace={CALLS}"]) == 0
    names = re.findall(r"^([a-z0-9]+)\(", log.read_text(), re.MULTILINE)
    return [(name, names[: index + 1].count(name)) for index, name in enumerate(names)]


async def killed_everywhere(forked: Forks, start: Start, job: Job, log: Path) -> AsyncIterator[Installation]:
    """What a new process finds after a kill at each call."""
    start.fresh()
    calls = await calls_of(forked, job, log)
    assert len(calls) > 8
    for name, number in calls:
        start.fresh()
        kill = ["-o", "/dev/null", "-e", f"trace={name}", "-e", f"inject={name}:signal=KILL:when={number}"]
        assert await traced(forked, job, kill) == -signal.SIGKILL, (name, number)
        assembled = start.recovered()
        worker = assembled.trees.private
        assert not [path for place in ("staging", "replaced") for path in (worker / place).iterdir()], (name, number)
        assert not [path for path in (worker / "state").iterdir() if path.suffix != ".json"], (name, number)
        assert assembled.trees.record(DIRECTORY).step == "cleaned"
        assert assembled.trees.record(DIRECTORY).attempt_inode == 0
        yield assembled
        await assembled.close()


def whole(start: Start, assembled: Installation) -> str:
    """The version that is installed, if it and the one before it are complete and run."""
    current, previous = assembled.trees.path_of(DIRECTORY), assembled.trees.previous_of(DIRECTORY)
    version = said_by(current)
    assert tree_of(current) == start.trees[version]
    assert said_by(previous) == _PREVIOUS[version]
    assert tree_of(previous) == start.trees[_PREVIOUS[version]]
    metadata = assembled.trees.metadata_of(DIRECTORY)
    assert metadata is not None
    assert metadata.digest == start.versions[version].digest
    return version


@pytest.mark.parametrize("can_exchange", [True, False])
async def test_a_kill_at_any_call_of_an_upgrade_leaves_the_old_or_the_new_version(
    forked: Forks, start: Start, tmp_path: Path, can_exchange: bool
) -> None:
    """F-018."""
    wanted = start.versions["v2"]
    job = Job(backends=str(start.backends), resolved=wanted, can_exchange=can_exchange)
    found = []
    async for assembled in killed_everywhere(forked, start, job, tmp_path / "log"):
        version = whole(start, assembled)
        # The meta name belongs to the version that came with it: both or neither.
        assert (start.backends / "named").exists() == (version == "v2")
        found.append(version)
        await assembled.installer.install(InstallRequest(resolved=wanted), silent, nothing)
        assert whole(start, assembled) == "v2"
        assert {backend.name: backend.is_broken for backend in assembled.trees.list_installed()} == {
            "engine": False,
            "named": False,
        }
    assert set(found) == {"v1", "v2"}
    assert found == sorted(found)


@pytest.mark.parametrize("can_exchange", [True, False])
async def test_a_kill_at_any_call_of_a_roll_back_leaves_one_of_the_two_versions(
    forked: Forks, start: Start, tmp_path: Path, can_exchange: bool
) -> None:
    job = Job(backends=str(start.backends), resolved=start.versions["v1"], work="roll_back", can_exchange=can_exchange)
    found = [whole(start, assembled) async for assembled in killed_everywhere(forked, start, job, tmp_path / "log")]
    assert set(found) == {"v0", "v1"}


@pytest.mark.parametrize("can_exchange", [True, False])
async def test_a_kill_at_any_call_of_an_install_of_the_previous_version_leaves_one_of_the_two(
    forked: Forks, start: Start, tmp_path: Path, can_exchange: bool
) -> None:
    wanted = msgspec.structs.replace(start.versions["v0"], meta="named")
    job = Job(backends=str(start.backends), resolved=wanted, can_exchange=can_exchange)
    found = []
    async for assembled in killed_everywhere(forked, start, job, tmp_path / "log"):
        found.append(whole(start, assembled))
        installed = await assembled.installer.install(InstallRequest(resolved=wanted, generation=7), silent, nothing)
        assert installed.fetched_bytes == 0
        assert whole(start, assembled) == "v0"
        listed = {backend.name: backend for backend in assembled.trees.list_installed()}
        assert {name: one.is_broken for name, one in listed.items()} == {"engine": False, "named": False}
        assert listed["engine"].generation == 7
    assert set(found) == {"v0", "v1"}


async def test_a_kill_at_any_call_of_a_removal_leaves_a_whole_version_or_none(
    forked: Forks, start: Start, tmp_path: Path
) -> None:
    job = Job(backends=str(start.backends), resolved=start.versions["v1"], work="remove")
    found = set()
    async for assembled in killed_everywhere(forked, start, job, tmp_path / "log"):
        is_there = start.backends.joinpath(DIRECTORY).exists()
        found.add(is_there)
        if is_there:
            assert whole(start, assembled) == "v1"
        await assembled.installer.remove(DIRECTORY)
        assert [path.name for path in start.backends.iterdir()] == [".enginehouse"]
        assert not list((assembled.trees.private / "previous").iterdir())
    assert found == {True, False}


def kill_moments(total: int, kills: int) -> Iterator[int]:
    """How many bytes each attempt may get: enough that every attempt dies on its way."""
    chance = random.Random(20)
    for _ in range(kills):
        yield chance.randint(1, 2 * total // kills)


async def test_kills_at_any_byte_cost_at_most_a_chunk_each(one: Shelf, forked: Forks) -> None:
    kills = 100 if IS_PROOF else 8
    # Everything eight times smaller than it is, so that a few kills weigh as much as a hundred.
    megabyte, scale = 1024 * 1024, 8
    sizes = (10, 7, 1) if not IS_PROOF else (96, 64, 8)
    layers = [{f"lib/{number}.so": noise(size * megabyte, number)} for number, size in enumerate(sizes)]
    layers[0]["run.sh"] = launcher("one")
    image = await one.publish("engine:1", layers, compression="none")
    total = sum(layer.size_bytes for layer in image.layers)
    job = Job(backends=str(one.backends), resolved=one.resolved("engine:1"), scale=scale)
    one.proxy.bytes_per_second = 1.5 * megabyte
    landed = 0
    for allowed in kill_moments(total, kills):
        before = one.proxy.bytes_sent("/blobs/")
        pid, _ = await forked.prepare(job)
        async with asyncio.TaskGroup() as group:
            ended = group.create_task(forked.go())
            await until(lambda: ended.done() or one.proxy.bytes_sent("/blobs/") - before >= allowed)  # noqa: B023
            if not ended.done():
                os.kill(pid, signal.SIGKILL)
        landed += ended.result() == -signal.SIGKILL
        assert not one.tree.exists() or ended.result() == 0
    verified = {path: os.stat(one.worker / "blobs" / path).st_ino for path in one.blobs() if not path.endswith("l")}
    one.proxy.bytes_per_second = None
    await forked.prepare(job)
    assert await forked.go() == 0
    assert landed >= 0.7 * kills
    configurations = image.config.size_bytes * (kills + 1)
    assert one.proxy.bytes_sent("/blobs/") <= total + landed * PART_BYTES // scale + configurations
    for number, size in enumerate(sizes):
        assert (one.tree / "lib" / f"{number}.so").read_bytes() == noise(size * megabyte, number)
    assert said_by(one.tree) == "one"
    # What was verified before the end is the very same file.
    kept = {name: inode for name, inode in verified.items() if not name.endswith(".part")}
    assert {name: os.stat(one.worker / "blobs" / name).st_ino for name in kept} == kept
    assert not one.residue()
    assert not one.blobs(".part")


@pytest.mark.parametrize("part", [1, 2])
async def test_layers_that_were_verified_before_a_kill_are_not_fetched_again(
    one: Shelf, forked: Forks, part: Literal[1, 2]
) -> None:
    layers = [{"run.sh": launcher("one"), "a": noise(400_000, 1)}, {"b": noise(400_000, 2)}, {"c": noise(3_000_000, 3)}]
    image = await one.publish("engine:1", layers)
    job = Job(backends=str(one.backends), resolved=one.resolved("engine:1"))
    one.proxy.bytes_per_second = 1_000_000
    pid, _ = await forked.prepare(job)
    verified = [layer.digest for layer in image.layers[:part]]
    async with asyncio.TaskGroup() as group:
        ended = group.create_task(forked.go())
        await until(lambda: all(one.assembled.blobs.path_of(digest).exists() for digest in verified))
        os.kill(pid, signal.SIGKILL)
    assert ended.result() == -signal.SIGKILL
    one.proxy.bytes_per_second = None
    one.again()
    assert not one.tree.exists()
    assert one.assembled.trees.list_installed() == ()
    await one.install(one.request("engine:1"))
    for digest in verified:
        assert len(one.proxy.asked(digest)) == 1
    assert said_by(one.tree) == "one"
