"""Engines that rewrite their environment at every start, as LocalAI's Python backends do, under confinement."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from tests.worker.probes import Targets, findings, program
from tests.worker.world import KEY, World, running_world, silent, tiny_chat, until

from enginehouse.core.installation import METADATA_FILE, Metadata, encode_metadata
from enginehouse.worker import writable_trees
from enginehouse.worker.engines.process_table import StartRequest

_RUN = """#!/bin/bash
set -e
here=$(dirname "$(realpath "$0")")
source $here/common/libbackend.sh
startBackend "$@"
"""
# What such scripts do, by the facts of LocalAI's: links, the home line, first lines of scripts.
_SCRIPTS = """
startBackend() {
    test "$(basename "$PWD")" = python-engine
    rm -f "$here/venv/bin/python"
    ln -s ../../python/bin/python3 "$here/venv/bin/python"
    sed -i "s|^home = .*|home = $here/python/bin|" "$here/venv/pyvenv.cfg"
    sed -i "1s|.*|#!$here/venv/bin/python|" "$here/venv/bin/tool"
    exec "$here/venv/bin/python" "$here/backend.py" "$@"
}
"""


def write_backend(tree: Path) -> None:
    """A tree with a relocatable Python and an environment whose configuration names another place."""
    for name in ("common", "python/bin", "venv/bin", f"venv/lib/python3.{sys.version_info[1]}/site-packages"):
        (tree / name).mkdir(parents=True)
    (tree / "run.sh").write_text(_RUN)
    (tree / "run.sh").chmod(0o755)
    (tree / "common" / "libbackend.sh").write_text(_SCRIPTS)
    (tree / "python" / "bin" / "python3").symlink_to(os.path.realpath(sys.executable))
    (tree / "python" / "lib").symlink_to(Path(sys.base_prefix, "lib"))
    (tree / "venv" / "bin" / "python").symlink_to("/nowhere/python3")
    (tree / "venv" / "bin" / "tool").write_text("#!/nowhere/python\nprint()\n")
    (tree / "venv" / "bin" / "large").write_bytes(bytes(2 * 1024 * 1024))
    (tree / "venv" / "pyvenv.cfg").write_text("home = /nowhere/bin\ninclude-system-site-packages = false\n")
    targets = Targets(write={"own": str(tree / "venv" / "pyvenv.cfg"), "new in own": str(tree / "new")})
    (tree / "backend.py").write_text(program(targets))
    (tree / METADATA_FILE).write_bytes(encode_metadata(Metadata(name=tree.name)))


def snapshot(tree: Path) -> dict[str, tuple[float, str]]:
    return {
        str(path.relative_to(tree)): (path.lstat().st_mtime, os.readlink(path) if path.is_symlink() else "")
        for path in tree.rglob("*")
    }


def request(slot: int) -> StartRequest:
    return StartRequest(model=tiny_chat(), slot=slot, directory="python-engine", key=KEY)


async def started(world: World, slot: int) -> str:
    return (await world.supervisor.start(request(slot))).address


async def test_such_an_engine_starts_and_its_tree_stays_as_it_was_installed(tmp_path: Path) -> None:
    async with running_world(tmp_path) as world:
        tree = world.place.backends / "python-engine"
        write_backend(tree)
        await world.models.pull(tiny_chat(), 1, silent)
        before = snapshot(tree)
        async with asyncio.TaskGroup() as group:
            both = [group.create_task(started(world, slot)) for slot in range(2)]
        for task in both:
            found = await asyncio.to_thread(findings, task.result())
            assert {found["write own"], found["write new in own"]} == {"EACCES"}
            assert found["model"] == "done"
        assert snapshot(tree) == before
        places = list((tmp_path / "tmp").iterdir())
        assert len(places) == 2
        await world.supervisor.stop_all()
        await until(lambda: not list((tmp_path / "tmp").iterdir()))
    assert (tree / "venv" / "pyvenv.cfg").read_text().startswith("home = /nowhere/bin")


def test_a_stand_in_has_copies_of_what_is_rewritten_and_links_to_the_rest(tmp_path: Path) -> None:
    tree, place = tmp_path / "backends" / "python-engine", tmp_path / "place"
    write_backend(tree)
    place.mkdir()
    made = writable_trees.make(tree, place)
    assert made == place / "python-engine"
    assert sorted(path.name for path in made.iterdir()) == sorted(path.name for path in tree.iterdir())
    for name in ("run.sh", "backend.py", "common/libbackend.sh", "venv/pyvenv.cfg", "venv/bin/tool"):
        assert not (made / name).is_symlink()
        assert (made / name).read_bytes() == (tree / name).read_bytes()
    for name in ("python", "venv/lib", "venv/bin/large"):
        assert os.readlink(made / name) == str(tree / name)
    assert os.readlink(made / "venv" / "bin" / "python") == "/nowhere/python3"
    assert os.access(made / "run.sh", os.X_OK)


@pytest.mark.parametrize("name", ["venv/bin", "common"])
def test_other_trees_need_none(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(parents=True)
    assert not writable_trees.is_needed(tmp_path)
