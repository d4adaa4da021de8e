"""Python packages as backends, from the real index: a launcher of their own, and nothing smuggled into uv."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import msgspec
import pytest
from tests.worker.world import nothing

from enginehouse.build_worker import make_installation
from enginehouse.core.backend import Resolved, package_digest
from enginehouse.core.errors import EnginehouseError, Hopeless, Invalid
from enginehouse.worker.backends.installation import Installation, InstallerOptions
from enginehouse.worker.backends.installer import InstallRequest

# Small, pure Python, without dependencies; the second has several console entry points.
SPEAKER = "cowsay==6.1"
SPEAKER_SHA256 = "274b1e6fc1b966d53976333eb90ac94cb07a450a700b455af9fbdf882244b30a"
CONVERTER = "docutils==0.21.2"


def package(uri: str, **fields: object) -> Resolved:
    made = msgspec.structs.replace(Resolved(directory="speaker", uri=uri, digest=""), **fields)
    digest = package_digest(made.uri, made.requirements, made.launcher, made.version)
    return msgspec.structs.replace(made, digest=digest)


@pytest.fixture
def assembled(tmp_path: Path) -> Installation:
    return make_installation(InstallerOptions(backends=tmp_path / "backends", stall_seconds=30.0), os.environ)


async def install(assembled: Installation, resolved: Resolved) -> Path:
    phases: list[str] = []
    request = InstallRequest(resolved=resolved)
    await assembled.installer.install(request, lambda phase, *_: phases.append(phase), nothing)
    assert list(dict.fromkeys(phases)) == ["resolving", "downloading", "extracting"]
    return assembled.trees.path_of(resolved.directory)


def run(tree: Path, *arguments: str) -> str:
    return subprocess.run(
        [tree / "run.sh", *arguments], check=True, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
    ).stdout


def left(assembled: Installation) -> list[str]:
    places = ("staging", "replaced", "previous")
    return [path.name for place in places for path in (assembled.trees.private / place).glob("*")]


async def test_a_package_is_installed_with_its_console_entry_point_as_launcher(assembled: Installation) -> None:
    tree = await install(assembled, package(f"pypi:{SPEAKER}"))
    assert "it works" in run(tree, "--text", "it works")
    metadata = assembled.trees.metadata_of("speaker")
    assert metadata is not None
    assert (metadata.uri, metadata.protocol) == (f"pypi:{SPEAKER}", "")
    # Moved, as the swap does to it, it still works.
    moved = tree.rename(tree.with_name("moved"))
    assert "still" in run(moved, "--text", "still")
    assert left(assembled) == []


async def test_one_of_several_entry_points_can_be_chosen(assembled: Installation) -> None:
    source = assembled.trees.backends.parent / "text.rst"
    source.write_text("*words*\n")
    tree = await install(assembled, package(f"pypi:{CONVERTER}#rst2xml"))
    assert "<emphasis>words</emphasis>" in run(tree, str(source))


async def test_an_entry_point_that_is_not_there_is_told_with_those_that_are(assembled: Installation) -> None:
    with pytest.raises(Hopeless, match=r"no console entry point nothing \(it has: cowsay\)") as caught:
        await install(assembled, package(f"pypi:{SPEAKER}#nothing"))
    assert caught.value.code == "unsupported"
    assert assembled.trees.list_installed() == ()
    assert left(assembled) == []


async def test_a_hash_is_honoured_and_a_wrong_one_refused(assembled: Installation, tmp_path: Path) -> None:
    tree = await install(assembled, package(f"pypi:{SPEAKER}", sha256=SPEAKER_SHA256))
    inode = assembled.trees.inode_of("speaker")
    assert "hashed" in run(tree, "--text", "hashed")
    request = InstallRequest(resolved=package(f"pypi:{SPEAKER}", sha256="0" * 64), force=True)
    with pytest.raises(Hopeless) as caught:
        await assembled.installer.install(request, lambda *_: None, nothing)
    assert caught.value.code == "digest_mismatch"
    assert assembled.trees.inode_of("speaker") == inode
    assert left(assembled) == []


SMUGGLED = [
    "--index-url=http://127.0.0.1:9/simple",
    "-e .",
    "a==1 --index-url http://127.0.0.1:9/",
    "a==1 -r /etc/passwd",
    "a @ http://127.0.0.1:9/a.whl",
    "a==1; python_version > '3'",
    "a==1\n--index-url=http://127.0.0.1:9/",
    "a[extra]==1",
    "git+https://127.0.0.1:9/a",
    "./a.whl",
    "a==1 --hash=sha256:zz",
    "a==1 --config-settings x=y --hash=sha256:" + "0" * 64,
    "$(touch owned)==1",
    "a==`touch owned`",
    "a==1 && touch owned",
    "a>=1",
    "a==*",
    "a",
    "",
    "../a==1",
    "a==1#--index-url",
]


# An empty one is none, and what chooses an entry point never reaches uv.
HARMLESS = [("launcher", ""), ("sha256", ""), ("uri", "a==1#--index-url")]
PLACES = ("uri", "requirements", "launcher", "sha256")


@pytest.mark.parametrize(
    ("place", "text"), [(place, text) for place in PLACES for text in SMUGGLED if (place, text) not in HARMLESS]
)
async def test_whatever_is_smuggled_into_a_description_is_refused_before_anything_runs(
    assembled: Installation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str, text: str
) -> None:
    """F-110."""
    started: list[object] = []

    async def start(*arguments: object, **options: object) -> asyncio.subprocess.Process:
        started.append(arguments)
        raise OSError("nothing may be started")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.chdir(tmp_path)
    match place:
        case "uri":
            resolved = package(f"pypi:{text}")
        case "requirements":
            resolved = package(f"pypi:{SPEAKER}", requirements=(text,))
        case "launcher":
            resolved = package(f"pypi:{SPEAKER}", launcher=text)
        case _:
            resolved = package(f"pypi:{SPEAKER}", sha256=text)
    with pytest.raises(Invalid) as caught:
        await assembled.installer.install(InstallRequest(resolved=resolved), lambda *_: None, nothing)
    assert caught.value.code in ("invalid_uri", "invalid_name", "unsupported", "uri_not_allowed")
    assert started == []
    assert not (tmp_path / "owned").exists()
    assert not assembled.trees.backends.exists() or left(assembled) == []


async def test_uv_hears_of_the_configured_index_only_and_of_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments and the environment that uv really gets."""
    seen: list[tuple[tuple[object, ...], object]] = []
    real = asyncio.create_subprocess_exec

    async def start(*arguments: object, **options: object) -> asyncio.subprocess.Process:
        seen.append((arguments, options.get("env")))
        return await real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    environment = dict(os.environ) | {"ENGINEHOUSE_TOKEN": "secret-word", "LOCALAI_API_KEY": "secret-word"}
    assembled = make_installation(InstallerOptions(backends=tmp_path / "backends"), environment)
    await install(assembled, package(f"pypi:{SPEAKER}"))
    assert len(seen) >= 2
    assert "secret-word" not in repr(seen)
    installing = [str(argument) for arguments, _ in seen for argument in arguments if "cowsay" in str(argument)]
    assert installing == [SPEAKER]
    assert all("--only-binary" in arguments for arguments, _ in seen if "install" in arguments)


async def test_a_package_that_does_not_exist_is_told_and_leaves_nothing(assembled: Installation) -> None:
    with pytest.raises(EnginehouseError) as caught:
        await install(assembled, package("pypi:cowsay==99.99.99"))
    assert caught.value.code == "not_found"
    assert left(assembled) == []
