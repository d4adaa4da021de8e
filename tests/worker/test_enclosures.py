"""Engines under confinement: a real process that tries, and is refused what is not its own and nothing else."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.worker.probes import Targets, findings, write_probe
from tests.worker.world import KEY, World, running_world, silent, tiny_chat, until

from enginehouse.core.errors import Hopeless, Invalid
from enginehouse.host import confinement, processes
from enginehouse.host.confinement import Confinement
from enginehouse.worker import enclosures
from enginehouse.worker.enclosures import Enclosures
from enginehouse.worker.engines.process_table import StartRequest

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
WORKS = (
    "resolve", "shared memory", "fork", "keep", "temporary", "socket", "reopen", "null", "random", "cpuinfo",
    "own environ", "sys", "model",
)  # fmt: skip


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The loop that the programs have: it takes fewer options of child processes than the library's own."""
    return "asyncio", {"use_uvloop": True}


def request() -> StartRequest:
    return StartRequest(model=tiny_chat(), slot=0, directory="probe", key=KEY, generation=1)


def secrets_in(data: Path) -> dict[str, str]:
    """What a data directory of `up` has besides what is the engine's."""
    for name in ("admin.token", "join.token", "node.key", "enginehouse.db", "bus/account.seed", "journal/x.json"):
        (data / name).parent.mkdir(exist_ok=True)
        (data / name).write_text("secret")
        (data / name).chmod(0o600)
    return {name: str(data / name) for name in ("admin.token", "join.token", "node.key", "enginehouse.db")} | {
        "seed": str(data / "bus" / "account.seed"),
        "journal": str(data / "journal" / "x.json"),
    }


async def tried(world: World, *, python: str = "", outside: Path | None = None) -> dict[str, Any]:
    data = world.place.directory
    other = data / "backends" / "other"
    other.mkdir(exist_ok=True)
    (other / "file").write_text("theirs")
    probe = data / "backends" / "probe"
    read = secrets_in(data) | {"other": str(other / "file"), "own": str(probe / "metadata.json")}
    if outside is not None:
        read["outside"] = str(outside)
    write = {"own": str(probe / "metadata.json"), "other": str(other / "file"), "new in own": str(probe / "new")}
    targets = Targets(read=read, write=write, list={"data": str(data), "models": str(data / "models")})
    write_probe(probe, targets, **({"python": python} if python else {}))
    await world.models.pull(tiny_chat(), 1, silent)
    started = await world.supervisor.start(request())
    return await asyncio.to_thread(findings, started.address)


async def test_an_engine_reads_no_secret_and_writes_to_no_tree(tmp_path: Path) -> None:
    async with running_world(tmp_path) as world:
        found = await tried(world)
    refused = {name: result for name, result in found.items() if name.split()[0] in ("read", "write", "list")}
    assert refused.pop("read own") == "done"
    assert [name for name in refused if refused[name] not in ("EACCES", "EPERM")] == []
    assert found["ptrace worker"] == "EPERM"
    assert found["signal worker"] == "EPERM"
    assert {name: found[name] for name in WORKS} == dict.fromkeys(WORKS, "done")


async def test_an_engine_has_a_home_that_stays_and_a_temporary_directory_that_does_not(tmp_path: Path) -> None:
    async with running_world(tmp_path) as world:
        found = await tried(world)
        home, temporary = Path(found["identity"][2]), Path(found["identity"][3])
        assert temporary.is_dir()
        assert home.is_relative_to(tmp_path / "engines" / "probe")
        await world.supervisor.stop("tiny-chat#0")
        await until(lambda: not temporary.exists())
        assert (home / "kernel").is_file()
        # Where what is installed cannot be looked at, nothing counts as gone.
        (tmp_path / "backends").rename(tmp_path / "away")
        await asyncio.to_thread(world.supervisor.tidy)
        (tmp_path / "away").rename(tmp_path / "backends")
        assert (home / "kernel").is_file()
        shutil.rmtree(tmp_path / "backends" / "probe")
        await asyncio.to_thread(world.supervisor.tidy)
        assert not (tmp_path / "engines" / "probe").exists()


async def test_a_temporary_directory_that_a_killed_worker_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    left = tmp_path / "tmp" / "0123abcd"
    left.mkdir(parents=True)
    (left / "file").write_text("left")
    async with running_world(tmp_path):
        assert not left.exists()


async def test_without_confinement_an_engine_reads_what_its_worker_reads(tmp_path: Path) -> None:
    """What the probe is worth: where nothing keeps it, it gets at all of it."""
    off = confinement.choose("off", "")
    async with running_world(tmp_path, chosen=off) as world:
        found = await tried(world)
    assert {found[f"read {name}"] for name in ("admin.token", "seed", "node.key", "worker environ")} == {"done"}
    assert found["write own"] == found["ptrace worker"] == found["signal worker"] == "done"
    assert found["identity"][2:4] == [os.environ.get("HOME"), os.environ.get("TMPDIR")]
    assert off.described == "none: disabled with --engine-confinement off"
    assert not off.protects_trees


@needs_root
async def test_an_engine_of_root_has_no_right_that_leads_around_its_confinement(tmp_path: Path) -> None:
    async with running_world(tmp_path) as world:
        found = await tried(world)
    has, privileges = int(found["identity"][4]), found["identity"][5]
    for forbidden in (2, 12, 13, 16, 17, 19, 21, 22, 25, 27):  # reading anything, raw sockets, modules, raw memory, …
        assert not has >> forbidden & 1, forbidden
    assert privileges == 1


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A data directory that another user can be let into: pytest's own are closed above."""
    place = Path(tempfile.mkdtemp(prefix="enginehouse-data-"))
    yield place
    shutil.rmtree(place)


@needs_root
@pytest.mark.parametrize("has_landlock", [True, False])
async def test_an_engine_runs_as_another_user_who_reads_its_own_alone(open_place: Path, has_landlock: bool) -> None:
    user = confinement.find_user("nobody")
    chosen = confinement.choose("auto", "nobody") if has_landlock else Confinement(user=user)
    assert chosen.described == ("landlock, user nobody" if has_landlock else "user nobody")
    async with running_world(open_place, chosen=chosen) as world:
        found = await tried(world, python="/usr/bin/python3")
        assert open_place.stat().st_mode & 0o007 == 0
    refused = {name: found[name] for name in found if name.split()[0] in ("read", "write", "list")}
    assert refused.pop("read own") == "done"
    assert not has_landlock or refused.pop("read other") == "EACCES"
    refused.pop("read other", "")  # without Landlock other trees are as their files say
    assert [name for name in refused if refused[name] not in ("EACCES", "EPERM")] == []
    assert {name: found[name] for name in WORKS} == dict.fromkeys(WORKS, "done")
    assert found["identity"][:2] == [user.uid, user.gid]
    assert found["signal worker"] == "EPERM"


@needs_root
async def test_engines_of_another_user_are_found_and_ended_by_their_nonce(open_place: Path) -> None:
    chosen = confinement.choose("auto", "nobody")
    async with running_world(open_place, chosen=chosen) as world:
        await tried(world, python="/usr/bin/python3")
        (replica,) = world.supervisor.running()
        assert list(processes.processes_with_nonce(replica.nonce))
        assert processes.kill_leftovers(replica.nonce, 5.0) > 0
        await until(lambda: not list(processes.processes_with_nonce(replica.nonce)))


@needs_root
async def test_a_data_directory_that_the_user_cannot_reach_is_refused_with_what_is_in_the_way(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(Invalid, match=r"it has no access to .*; use another data directory"):
        async with running_world(closed / "data", chosen=Confinement(user=confinement.find_user("nobody"))):
            pass


async def test_a_start_that_fails_for_want_of_a_file_says_that_the_engine_is_confined(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("needed")
    async with running_world(tmp_path / "data") as world:
        write_probe(world.place.backends / "probe", Targets(), needs=str(outside))
        await world.models.pull(tiny_chat(), 1, silent)
        with pytest.raises(Hopeless, match=r"Permission denied.*confined.*--engine-confinement off") as caught:
            await world.supervisor.start(request())
        assert str(outside) in caught.value.message


def test_a_refusal_is_explained_by_what_applies(tmp_path: Path) -> None:
    user = confinement.User("engines", 900, 900)
    cases = {
        Confinement(landlock_abi=7): "(landlock). If the engine needs this access, start the worker with --engine-conf",
        Confinement(user=user): "let engines read the file, or start the worker without --engine-user",
        Confinement(landlock_abi=7, user=user): "without --engine-user or with --engine-confinement off",
    }
    for chosen, hint in cases.items():
        told = Enclosures(tmp_path, chosen).explain("it ended", ["open /x: Permission denied", "it ended"])
        assert told.startswith("it ended (open /x: Permission denied); ")
        assert hint in told
        assert Enclosures(tmp_path, chosen).explain("it ended", ["no memory", "it ended"]) == "it ended"
    off = confinement.choose("off", "")
    assert Enclosures(tmp_path, off).explain("x: Permission denied", ["x: Permission denied"]) == "x: Permission denied"


async def test_a_data_directory_inside_a_directory_of_the_system_stays_hidden(tmp_path: Path) -> None:
    for name in ("data", "lib", "deep/er/file", "deep/other"):
        (tmp_path / name).mkdir(parents=True)
    assert confinement.without(tmp_path, ()) == [tmp_path]
    assert confinement.without(tmp_path, [tmp_path]) == []
    parts = confinement.without(tmp_path, [tmp_path / "data", tmp_path / "deep" / "er"])
    assert parts == [tmp_path / "deep" / "other", tmp_path / "lib"]


async def test_engines_are_given_the_python_that_they_were_made_with_and_no_more(tmp_path: Path) -> None:
    installation, tree = tmp_path / "home" / "python", tmp_path / "tree"
    (installation / "lib" / "python3.12").mkdir(parents=True)
    (installation / "lib" / "python3.12" / "os.py").touch()
    (installation / "bin").mkdir()
    (installation / "bin" / "python3").touch()
    (tree / "venv" / "bin").mkdir(parents=True)
    (tree / "venv" / "bin" / "python").symlink_to(installation / "bin" / "python3")
    (tree / "venv" / "pyvenv.cfg").write_text(f"home = {installation / 'bin'}\nversion_info = 3.12\n")
    (tree / "run.sh").write_text(f"#!{tmp_path / 'home' / 'bin' / 'python'}\n")
    assert set(enclosures.interpreters(tree)) == {installation / name for name in ("bin", "lib", "lib64")}


async def test_what_is_checked_at_an_install_is_confined_too(tmp_path: Path) -> None:
    secret, tree = tmp_path / "admin.token", tmp_path / "backends" / ".enginehouse" / "staging" / "probe"
    secret.write_text("secret")
    tree.mkdir(parents=True)
    (tree / "run.sh").write_text(f'#!/bin/sh\ncat {secret} >&2 && exit 1\necho "$HOME" > "$TMPDIR/x" || exit 2\n')
    (tree / "run.sh").chmod(0o750)
    made = Enclosures(tmp_path, confinement.choose("auto", ""))
    with made.for_check(tree) as enclosure, made.confined(enclosure) as confined:
        environment = {"PATH": os.environ["PATH"], **enclosure.environment}
        code, told = await processes.run_briefly(
            [str(tree / "run.sh")], directory=tree, environment=environment, limit_seconds=10, confined=confined
        )
    assert (code, "Permission denied" in told) == (0, True)


async def test_an_engine_that_cannot_be_confined_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginehouse.host.landlock.restrict", lambda descriptor: False)
    async with running_world(tmp_path) as world:
        write_probe(world.place.backends / "probe", Targets())
        await world.models.pull(tiny_chat(), 1, silent)
        with pytest.raises(Hopeless, match="code 126: it could not be confined"):
            await world.supervisor.start(request())
