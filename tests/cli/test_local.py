"""`enginehouse local` and `enginehouse backends plan`: the real commands on a real registry, without any server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.fetch.images import write_image
from tests.fetch.registry import Registry, running_registry
from tests.worker.shelf import launcher, noise, said_by

from enginehouse.host import hardware
from enginehouse.worker.assembly import lock

PROGRAM = str(Path(sys.executable).with_name("enginehouse"))
LARGE = noise(300_000)


class Place:
    """A backends directory, a gallery file and the commands on them."""

    def __init__(self, root: Path, registry: Registry) -> None:
        self.root = root
        self.registry = registry
        self.backends = root / "backends"
        self.gallery = root / "gallery.yaml"
        self.gallery.write_text(
            "- {name: engine, capabilities: {default: cpu-engine}}\n"
            f"- {{name: cpu-engine, alias: machine, uri: '{registry.reference('engine:latest')}'}}\n"
        )

    async def publish(self, version: str) -> None:
        layers = [{"lib/large.so": LARGE}, {"run.sh": launcher(version)}]
        image = write_image(self.root / f"layout-{version}", layers, platform=hardware.platform())
        await self.registry.push(image.directory, "engine:latest")

    def run(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "ENGINEHOUSE_DATA": str(self.root / "data"),
            "ENGINEHOUSE_BACKENDS_PATH": str(self.backends),
            "ENGINEHOUSE_BACKEND_GALLERIES": json.dumps([{"name": "lab", "url": f"file://{self.gallery}"}]),
            "ENGINEHOUSE_ALLOWED_HOSTS": "127.0.0.1",
            "ENGINEHOUSE_CAPABILITY": "default",
            "LOCALAI_BACKENDS_SYSTEM_PATH": str(self.root / "system"),
        }
        done = subprocess.run(
            [PROGRAM, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def local(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return self.run("local", *arguments, code=code)

    def listed(self) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in json.loads(self.local("list", "--json").stdout)}

    def plan(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("backends", "plan", name, "--json").stdout)
        return found


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with running_registry(tmp_path) as registry:
        made = Place(tmp_path, registry)
        await made.publish("one")
        yield made


async def test_a_gallery_name_becomes_an_engine_that_is_upgraded_rolled_back_and_deleted(place: Place) -> None:
    told = place.local("install", "engine")
    assert "capability default → key default → cpu-engine" in told.stderr
    assert told.stdout.startswith("installed cpu-engine (")
    assert said_by(place.backends / "cpu-engine") == "one"
    listed = place.listed()
    assert (listed["engine"]["kind"], listed["engine"]["leads_to"]) == ("meta", "cpu-engine")
    assert (listed["cpu-engine"]["kind"], listed["cpu-engine"]["can_roll_back"]) == ("installed", False)
    assert place.local("install", "engine").stdout == "cpu-engine is installed already\n"

    assert "is the newest" in place.local("upgrade", "--all", "--check").stdout
    await place.publish("two")
    assert "there is another version" in place.local("upgrade", "engine", "--check").stdout
    assert place.local("upgrade", "engine").stdout.startswith("installed cpu-engine (")
    assert said_by(place.backends / "cpu-engine") == "two"

    assert place.local("rollback", "engine").stdout.startswith("engine is back at sha256:")
    assert said_by(place.backends / "cpu-engine") == "one"
    place.local("rollback", "cpu-engine")
    assert said_by(place.backends / "cpu-engine") == "two"

    assert place.local("gc", "--cap", "0").stdout.startswith("removed 0")
    assert place.local("delete", "engine").stdout == "deleted cpu-engine\n"
    assert place.listed() == {}
    assert not place.local("gc", "--cap", "0").stdout.startswith("removed 0")
    assert [path.name for path in place.backends.iterdir()] == [".enginehouse"]


async def test_a_plan_says_what_an_install_then_does(place: Place) -> None:
    before = place.plan("engine")
    assert before["reasons"] == ["capability default → key default → cpu-engine"]
    plan = before["plan"]
    assert (plan["reused_bytes"], plan["is_current"]) == (0, False)
    installed = json.loads(place.local("install", "engine", "--json").stdout)
    assert installed["fetched_bytes"] == plan["fetch_bytes"] == plan["total_bytes"]
    assert (installed["digest"], installed["directory"]) == (plan["digest"], "cpu-engine")
    assert place.plan("engine")["plan"]["is_current"]
    await place.publish("two")
    upgrade = place.plan("engine")["plan"]
    # The layer with the large file is the same in both versions.
    assert 0 < upgrade["fetch_bytes"] < 10_000 < upgrade["reused_bytes"]
    shown = place.run("backends", "plan", "engine").stdout
    assert "now\tanother version" in shown
    assert "why\tcapability default → key default → cpu-engine" in shown
    assert not (place.backends / "cpu-engine" / ".part").exists()


async def test_anything_with_an_address_can_be_installed_under_a_name(place: Place, tmp_path: Path) -> None:
    place.local("install", place.registry.reference("engine:latest"), "--name", "by-hand", "--alias", "mine")
    assert said_by(place.backends / "by-hand") == "one"
    metadata = json.loads((place.backends / "by-hand" / "metadata.json").read_text())
    assert (metadata["alias"], metadata["uri"]) == ("mine", place.registry.reference("engine:latest"))

    mine = tmp_path / "my-engine"
    mine.mkdir()
    (mine / "run.sh").write_bytes(launcher("mine"))
    (mine / "run.sh").chmod(0o755)
    place.local("install", str(mine))
    assert said_by(place.backends / "my-engine") == "mine"
    place.local("install", f"ocifile://{tmp_path / 'layout-one'}", "--name", "from-layout")
    assert said_by(place.backends / "from-layout") == "one"
    refused = place.local("install", place.registry.reference("engine:latest"), code=2)
    assert "give the directory to install into with --name" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("install", "no-such-engine"), 5, "cannot find a backend named 'no-such-engine' in any gallery"),
        (("install", "engine", "--name", "other"), 2, "cannot give engine another name"),
        (("install", "http://127.0.0.1/x.rar", "--name", "x"), 2, "an archive must end in"),
        (("install", "https://10.0.0.1/x.tar", "--name", "x", "--sha256", "0" * 64), 2, "10.0.0.1"),
        (("install", "./nowhere", "--name", "x"), 1, "is not a directory"),
        (("rollback", "engine"), 5, "cannot find a backend named 'engine' in"),
        (("delete", "../engine"), 2, "cannot use '../engine' as a backend name"),
        (("upgrade",), 2, "Say what to upgrade"),
        (("gc", "--cap", "much"), 2, "a size is written like 500MiB or 20GiB"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...], code: int, told: str
) -> None:
    place = Place(tmp_path, Registry("127.0.0.1:9", False, tmp_path))
    done = place.local(*arguments, code=code)
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("enginehouse: ")]
    assert told in sentence
    assert "Traceback" not in done.stderr
    assert not place.backends.exists() or [path.name for path in place.backends.iterdir()] == [".enginehouse"]


async def test_a_directory_that_another_process_works_on_is_left_alone(place: Place) -> None:
    held = lock(place.backends, "test")
    try:
        refused = place.local("install", "engine", code=1)
        assert f"{place.backends} is in use by process {os.getpid()}" in refused.stderr
        assert place.listed() == {}
    finally:
        held.release()


async def test_backends_of_the_system_are_listed_and_cannot_be_deleted(place: Place, tmp_path: Path) -> None:
    tree = tmp_path / "system" / "old-engine"
    tree.mkdir(parents=True)
    (tree / "run.sh").write_bytes(launcher("old"))
    (tree / "run.sh").chmod(0o755)
    assert place.listed()["old-engine"]["kind"] == "system"
    assert "it belongs to the system" in place.local("delete", "old-engine", code=2).stderr
