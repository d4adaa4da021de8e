"""Installing the real engine: whole or not at all, whatever happens on the way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest
from tests.worker.world import KEY, World, link_tree, nothing, silent, tiny_chat, until, xllamacpp

from enginehouse.build_worker import make_installation
from enginehouse.core.action import InstallBackend, StartReplica
from enginehouse.core.backend import Resolved, find, package_digest
from enginehouse.core.errors import Conflict, EnginehouseError, Hopeless, Invalid, Unavailable, Upstream
from enginehouse.core.installation import METADATA_FILE, Version
from enginehouse.host import disk
from enginehouse.worker.backends.installer import InstallRequest
from enginehouse.worker.backends.python_packages import link_libgomp
from enginehouse.worker.backends.swap import Swap
from enginehouse.worker.backends.trees import Trees
from enginehouse.worker.commands.work import Work


def names(world: World) -> list[str]:
    """What is there beside what is ours; nothing may be left in staging."""
    worker = world.place.backends / ".enginehouse"
    assert not [path.name for place in ("staging", "replaced") for path in worker.glob(f"{place}/*")]
    return visible(world.place.backends)


def visible(backends: Path) -> list[str]:
    return sorted(path.name for path in backends.iterdir() if path.name != ".enginehouse")


def changed(resolved: Resolved, **fields: object) -> Resolved:
    """Another description with the digest that belongs to it."""
    other = msgspec.structs.replace(resolved, **fields)
    digest = package_digest(other.uri, other.requirements, other.launcher, other.version)
    return msgspec.structs.replace(other, digest=digest)


def run_check(tree: Path) -> int:
    return subprocess.run([tree / "run.sh", "--check"], check=False).returncode


@pytest.fixture
def empty(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_an_install_places_a_complete_tree_and_the_meta_name(empty: World) -> None:
    seen: list[tuple[str, int, int]] = []
    request = InstallRequest(resolved=xllamacpp(), generation=7)
    await empty.installer.install(request, lambda phase, _, done, total: seen.append((phase, done, total)), nothing)
    assert names(empty) == ["llama-cpp", "xllamacpp"]
    backend = find(empty.trees.list_installed(), "llama-cpp")
    assert backend is not None
    assert (backend.name, backend.digest, backend.generation) == ("xllamacpp", xllamacpp().digest, 7)
    assert seen[0][0] == "resolving"
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1:] == (xllamacpp().size_bytes, xllamacpp().size_bytes)
    assert run_check(empty.place.backends / "xllamacpp") == 0


async def test_what_is_installed_already_is_not_built_again_but_its_generation_is_noted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    inode = world.trees.inode_of("xllamacpp")
    monkeypatch.setenv("UV_OFFLINE", "1")
    await world.installer.install(InstallRequest(resolved=xllamacpp(), generation=9), silent, nothing)
    assert world.trees.inode_of("xllamacpp") == inode
    assert {backend.name: backend.generation for backend in world.trees.list_installed()}["xllamacpp"] == 9


async def test_a_backend_without_its_run_file_is_broken_and_repaired(world: World) -> None:
    """F-010."""
    (world.place.backends / "xllamacpp" / "run.sh").unlink()
    (broken,) = world.trees.list_installed()
    assert broken.is_broken
    await world.installer.install(InstallRequest(resolved=xllamacpp()), silent, nothing)
    assert not any(backend.is_broken for backend in world.trees.list_installed())


async def test_junk_hides_nothing(world: World) -> None:
    (world.place.backends / "junk").mkdir()
    (world.place.backends / "a-file").write_text("")
    (world.place.backends / "odd").mkdir()
    (world.place.backends / "odd" / METADATA_FILE).write_bytes(b"\xff{")
    (world.place.backends / "odder").mkdir()
    (world.place.backends / "odder" / METADATA_FILE).mkdir()
    listed = {backend.name: backend.is_broken for backend in world.trees.list_installed()}
    assert listed == {"odd": True, "odder": True, "xllamacpp": False}


async def test_without_a_network_it_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    closed = {
        "UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple",
        "UV_HTTP_RETRIES": "0",
        "UV_CACHE_DIR": str(tmp_path / "c"),
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UV_")} | closed
    world = World(tmp_path)
    installer = make_installation(world.place.installing, environment).installer
    with pytest.raises(Upstream, match="the package index cannot be reached; check the network") as caught:
        await installer.install(InstallRequest(resolved=xllamacpp()), silent, nothing)
    assert caught.value.code == "upstream_error"
    assert names(world) == []


async def test_a_wrong_hash_keeps_the_old_version_in_place(world: World) -> None:
    before = world.trees.inode_of("xllamacpp")
    wrong = changed(xllamacpp(), requirements=("pykdtree==1.4.3 --hash=sha256:" + "0" * 64,))
    with pytest.raises(Hopeless) as caught:
        await world.installer.install(InstallRequest(resolved=wrong), silent, nothing)
    assert caught.value.code == "digest_mismatch"
    assert world.trees.inode_of("xllamacpp") == before
    assert names(world) == ["xllamacpp"]


async def test_a_package_that_cannot_run_here_is_told_before_it_takes_the_place(world: World) -> None:
    # Without the engine itself, the launcher's check must fail.
    without = changed(xllamacpp(), requirements=(xllamacpp().requirements[1],))
    with pytest.raises(Hopeless, match="cannot use xllamacpp on this machine: No module named") as caught:
        await world.installer.install(InstallRequest(resolved=without), silent, nothing)
    assert caught.value.code == "unsupported_platform"
    assert names(world) == ["xllamacpp"]


@pytest.mark.parametrize(
    ("resolved", "code"),
    [
        (changed(xllamacpp(), uri="pypi:xllamacpp"), "invalid_uri"),
        (changed(xllamacpp(), uri="pypi:--index-url==1"), "invalid_uri"),
        (changed(xllamacpp(), uri="ftp://somewhere/image.tar"), "uri_not_allowed"),
        (changed(xllamacpp(), launcher="no-such-launcher"), "unsupported"),
        (changed(xllamacpp(), requirements=("--index-url=http://evil", "a==1")), "invalid_uri"),
        (changed(xllamacpp(), directory="../outside"), "invalid_name"),
        (changed(xllamacpp(), directory="x.install-tmp"), "invalid_name"),
        (changed(xllamacpp(), meta="a/b"), "invalid_name"),
        (msgspec.structs.replace(xllamacpp(), digest="sha256:0"), "digest_mismatch"),
    ],
)
async def test_a_description_that_is_not_right_is_refused(empty: World, resolved: Resolved, code: str) -> None:
    with pytest.raises(EnginehouseError) as caught:
        await empty.installer.install(InstallRequest(resolved=resolved), silent, nothing)
    assert caught.value.code == code
    assert names(empty) == []


async def test_a_meta_name_never_covers_a_backend(world: World) -> None:
    link_tree(world.place.backends / "xllamacpp", world.place.backends / "llama-cpp")
    with pytest.raises(Conflict):
        await world.installer.install(InstallRequest(resolved=xllamacpp(), force=True), silent, nothing)


async def test_cancelling_at_any_step_leaves_the_old_version_and_nothing_else(world: World) -> None:
    before = world.trees.inode_of("xllamacpp")
    for phase in ("resolving", "downloading", "extracting"):
        reached = asyncio.Event()

        def report(now: str, *_: object, wanted: str = phase, event: asyncio.Event = reached) -> None:
            if now == wanted:
                event.set()

        async with asyncio.TaskGroup() as group:
            request = InstallRequest(resolved=xllamacpp("other"), force=True)
            task = group.create_task(world.installer.install(request, report, nothing))
            await asyncio.wait_for(reached.wait(), 30)
            task.cancel()
        assert world.trees.inode_of("xllamacpp") == before
        assert names(world) == ["xllamacpp"]


async def test_a_full_disk_is_told_before_anything_is_fetched(empty: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda path: 1000)
    with pytest.raises(Unavailable) as caught:
        await empty.installer.install(InstallRequest(resolved=xllamacpp()), silent, nothing)
    assert caught.value.code == "insufficient_disk"


async def test_removing_takes_the_meta_name_along_and_can_be_repeated(world: World) -> None:
    await world.installer.install(InstallRequest(resolved=xllamacpp()), silent, nothing)
    assert names(world) == ["llama-cpp", "xllamacpp"]
    await world.installer.remove("xllamacpp")
    await world.installer.remove("xllamacpp")
    assert names(world) == []


async def test_processes_of_the_old_tree_are_dealt_with_while_it_is_still_there(world: World) -> None:
    beside: list[str] = []

    async def swapped() -> None:
        beside.extend(path.name for path in (world.place.backends / ".enginehouse" / "replaced").iterdir())

    await world.installer.install(InstallRequest(resolved=xllamacpp("2"), force=True), silent, swapped)
    assert beside == ["xllamacpp"]
    assert names(world) == ["llama-cpp", "xllamacpp"]


def working_in(place: Path) -> dict[int, str]:
    """Processes whose working directory is below `place`, or was."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            directory = os.readlink(process / "cwd")
            if directory.startswith(str(place)):
                found[int(process.name)] = directory
    return found


async def test_a_process_that_will_not_end_does_not_outlive_the_swap(world: World) -> None:
    """F-019."""
    start = StartReplica(model=tiny_chat(), slot=0, directory="xllamacpp", key=KEY)
    first = await world.actions.perform(Work(action=start), silent)
    backends = world.place.backends.resolve()
    (engine,) = working_in(backends)
    # Whoever is stopped hears no request to end.
    os.kill(engine, signal.SIGSTOP)
    upgrade = InstallBackend(backend="llama-cpp", resolved=xllamacpp("2"), upgrade=True)
    upgraded = await world.actions.perform(Work(action=upgrade), silent)
    assert upgraded.stopped == ("tiny-chat#0",)
    assert working_in(backends) == {}
    assert world.supervisor.running() == ()
    second = await world.actions.perform(Work(action=start), silent)
    assert second.nonce != first.nonce
    assert list(working_in(backends).values()) == [str(backends / "xllamacpp")]


def make_version(path: Path, version: str) -> None:
    path.mkdir(parents=True)
    (path / "run.sh").write_text(version)
    (path / "run.sh").chmod(0o750)
    (path / METADATA_FILE).write_text(f'{{"version": "{version}"}}')


def version_of(path: Path) -> str:
    version = (path / "run.sh").read_text()
    assert (path / METADATA_FILE).read_text() == f'{{"version": "{version}"}}'
    return version


class Killed(BaseException):
    """Stands for a kill: nothing after it runs, no clean-up either."""


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("steps", range(9))
def test_a_kill_between_any_two_steps_of_the_swap_leaves_a_whole_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool, steps: int
) -> None:
    trees = Trees(tmp_path)
    trees.make_directories()
    make_version(tmp_path / "engine", "old")
    make_version(trees.previous_of("engine"), "older")
    make_version(trees.staging_of("engine"), "new")
    inode = trees.staging_of("engine").stat().st_ino
    left = steps

    def step() -> None:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1

    rename, exchange, remove = Path.rename, disk.exchange, disk.remove_tree

    def stepped_rename(path: Path, target: Path) -> Path:
        step()
        return rename(path, target)

    def stepped_exchange(first: Path, second: Path) -> bool:
        step()
        return can_exchange and exchange(first, second)

    def stepped_remove(path: Path) -> None:
        step()
        remove(path)

    resolved = Resolved(directory="engine", uri="", digest="", meta="named")
    trees.reach_staged("engine", Version(inode=inode, digest="new"), resolved)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", stepped_rename)
        patched.setattr(disk, "exchange", stepped_exchange)
        patched.setattr(disk, "remove_tree", stepped_remove)
        try:
            Swap(trees).swap_in("engine")
            Swap(trees).finish("engine")
            killed = False
        except Killed:
            killed = True
    recovered = Trees(tmp_path)
    Swap(recovered).recover()
    version = version_of(tmp_path / "engine")
    assert (version, version_of(trees.previous_of("engine"))) in {("old", "older"), ("new", "old")}
    # The meta name belongs to the install: both or neither.
    assert not killed or (tmp_path / "named").exists() == (version == "new")
    assert not list((tmp_path / ".enginehouse" / "staging").iterdir())
    assert not list((tmp_path / ".enginehouse" / "replaced").iterdir())
    assert recovered.record("engine").step == "cleaned"
    Swap(recovered).recover()
    assert version_of(tmp_path / "engine") == version


def test_a_record_that_cannot_be_read_is_no_record_of_something_finished(tmp_path: Path) -> None:
    trees = Trees(tmp_path)
    trees.make_directories()
    assert trees.record("engine").step == "cleaned"
    trees.reach("engine", "swapped")
    (path,) = (trees.private / "state").iterdir()
    path.unlink()
    path.mkdir()  # any error but its absence
    with pytest.raises(OSError, match="directory"):
        trees.record("engine")


def test_recovering_puts_back_a_backup_only_where_nothing_runs(tmp_path: Path) -> None:
    make_version(tmp_path / "one.install-backup", "old")
    make_version(tmp_path / "two.backup", "old")
    make_version(tmp_path / "two", "new")
    (tmp_path / "three.upgrade-tmp").mkdir()
    Swap(Trees(tmp_path)).recover()
    assert {name: version_of(tmp_path / name) for name in visible(tmp_path)} == {"one": "old", "two": "new"}


def test_a_slim_machine_gets_the_libgomp_of_a_package(tmp_path: Path, installed_tree: Path) -> None:
    tree = tmp_path / "moved"
    shutil.copytree(installed_tree, tree, symlinks=True, copy_function=os.link)
    assert link_libgomp(tree)
    script = "import xllamacpp; print([line for line in open('/proc/self/maps') if 'libgomp' in line][0])"
    environment = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(tree / "lib")}
    ended = subprocess.run(
        [tree / "venv" / "bin" / "python", "-I", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "pykdtree.libs" in ended.stdout


async def test_an_unknown_launcher_name_cannot_leave_the_package(empty: World) -> None:
    with pytest.raises(Invalid):
        await empty.installer.install(InstallRequest(resolved=changed(xllamacpp(), launcher="../x")), silent, nothing)
    await until(lambda: names(empty) == [])
