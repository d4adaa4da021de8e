"""`enginehouse local` and `enginehouse backends plan`: the real commands on a real registry, without any server."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.artifact.archives import file, header, pax, tar
from tests.fetch.images import write_image
from tests.fetch.real_registry import Registry, running_registry
from tests.worker.shelf import launcher, noise, said_by

from enginehouse.core.backend import package_digest
from enginehouse.core.errors import NotFound
from enginehouse.core.installation import Metadata
from enginehouse.host import confinement, hardware
from enginehouse.worker.backends.installation import lock_backends
from enginehouse.worker.local import resolved_from

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
    assert place.local("install", "engine").stdout == "cpu-engine is already installed\n"

    assert "up to date" in place.local("upgrade", "--all", "--check").stdout
    await place.publish("two")
    assert "another version is available" in place.local("upgrade", "engine", "--check").stdout
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
    assert "give one with --name" in refused.stderr


async def test_rights_that_are_not_kept_are_named(place: Place, tmp_path: Path) -> None:
    capability = pax({"SCHILY.xattr.security.capability": b"\x01\x00\x00\x02" + bytes(16)})
    layer = tar(file("run.sh", launcher("one"), 0o755), capability + header("bin/ping", mode=0o755))
    write_image(tmp_path / "layout", [layer], platform=hardware.platform())
    told = place.local("install", f"ocifile://{tmp_path / 'layout'}", "--name", "pinging")
    assert "security.capability of 'bin/ping'" in told.stderr


@pytest.mark.parametrize("is_own", [True, False])
async def test_versions_of_a_named_directory_have_no_file_in_common(place: Place, is_own: bool, tmp_path: Path) -> None:
    """It may be LocalAI's, whose engines write to their trees; the own one is protected where engines are confined."""
    if is_own:
        place.backends = tmp_path / "data/backends"
    place.local("install", "engine")
    await place.publish("two")
    told = place.local("upgrade", "engine").stdout
    current = place.backends / "cpu-engine/lib/large.so"
    previous = place.backends / ".enginehouse/previous/cpu-engine/lib/large.so"
    is_linked = current.samefile(previous)
    assert is_linked == ("shared with other versions by hard links" in told)
    assert not is_linked or (is_own and confinement.choose("auto", "").protects_trees)


@pytest.mark.parametrize("command", [("list",), ("gc",), ("install", "engine"), ("delete", "engine")])
async def test_a_backends_directory_that_is_none_is_named(place: Place, command: tuple[str, ...]) -> None:
    place.backends.write_text("mine")
    told = place.local(*command, code=1).stderr.splitlines()[-1]
    assert told.startswith(f"enginehouse: cannot use {place.backends} as backends directory: ")
    assert "--backends-path" in told
    assert place.backends.read_text() == "mine"


async def test_an_upgrade_from_a_directory_that_did_not_change_keeps_the_version_before(
    place: Place, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    for version in ("one", "two"):
        (mine / "run.sh").write_bytes(launcher(version))
        (mine / "run.sh").chmod(0o755)
        place.local("install", str(mine))
    assert "to fetch\t0 B\n" in place.run("backends", "plan", str(mine), "--local").stdout
    assert place.local("upgrade", "mine", "--check").stdout == "mine: up to date\n"
    for command in (("install", str(mine)), ("upgrade", "mine")):
        assert place.local(*command).stdout == "mine is already installed\n"
    place.local("rollback", "mine")
    assert said_by(place.backends / "mine") == "one"
    assert "another version is available" in place.local("upgrade", "mine", "--check").stdout
    assert place.local("upgrade", "mine").stdout.startswith("installed mine")
    assert said_by(place.backends / "mine") == "two"
    assert place.local("install", str(mine), "--force").stdout.startswith("installed mine")


async def test_an_archive_is_upgraded_to_what_its_digest_says(place: Place, tmp_path: Path) -> None:
    served = tmp_path / "served"
    served.mkdir()
    with tarfile.open(served / "engine.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("run.sh")
        entry.mode, entry.size = 0o755, len(launcher("packed"))
        archive.addfile(entry, io.BytesIO(launcher("packed")))
    digest = hashlib.sha256((served / "engine.tar.gz").read_bytes()).hexdigest()
    with serving(served) as address:
        place.local("install", f"{address}/engine.tar.gz", "--name", "packed", "--sha256", digest)
    # The server is gone: what an archive is was said when it was installed.
    assert json.loads(place.local("upgrade", "packed", "--check", "--json").stdout) == [
        {"directory": "packed", "upgrade": False, "digest": f"sha256:{digest}"}
    ]
    assert place.local("upgrade", "--all").stdout == "packed is already installed\n"


def test_a_package_by_its_address_has_no_other_version_and_one_of_a_lost_gallery_is_left_alone() -> None:
    address = "pypi:engine==1.0"
    own = Metadata(uri=address, digest=package_digest(address, (), "", ""))
    assert resolved_from(own, "engine").digest == own.digest
    described = Metadata(uri=address, digest=package_digest(address, ("engine==1.0 --hash=sha256:00",), "", ""))
    with pytest.raises(NotFound, match="cannot upgrade engine"):
        resolved_from(described, "engine")


async def test_an_upgrade_says_in_its_exit_code_and_in_json_what_it_did(place: Place) -> None:
    assert place.local("upgrade", "--all").stderr == "nothing is installed here\n"
    assert json.loads(place.local("upgrade", "--all", "--check", "--json").stdout) == []
    assert "cannot find a backend named 'nothing'" in place.local("upgrade", "nothing", code=5).stderr
    place.local("upgrade", "nothing", "nowhere", code=5)
    place.local("install", "engine")
    checked = json.loads(place.local("upgrade", "engine", "nothing", "--check", "--json", code=3).stdout)
    assert [(one["directory"], one["upgrade"]) for one in checked] == [("cpu-engine", False)]


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[str]:
    """An HTTP server of the files in a directory, and its address."""
    made = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), made) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(10)


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("install", "no-such-engine"), 5, "cannot find a backend named 'no-such-engine' in any gallery"),
        (("install", "engine", "--name", "other"), 2, "cannot use --name, --alias or --sha256 with engine"),
        (("install", "http://127.0.0.1/x.rar", "--name", "x"), 2, "an archive must end in"),
        (("install", "https://10.0.0.1/x.tar", "--name", "x", "--sha256", "0" * 64), 2, "10.0.0.1"),
        (("install", "./nowhere", "--name", "x"), 1, "is not a directory"),
        (("rollback", "engine"), 5, "cannot find a backend named 'engine' in"),
        (("delete", "../engine"), 2, "cannot use '../engine' as a backend name"),
        (("upgrade",), 2, "Specify what to upgrade"),
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
    held = lock_backends(place.backends, "test")
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
