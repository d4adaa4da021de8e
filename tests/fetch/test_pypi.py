"""Packages through the real uv: what goes in, what it is told, and what its failures mean."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest

from enginehouse.core.errors import EnginehouseError, Hopeless, Invalid, Unavailable, Upstream
from enginehouse.fetch.galleries.sources import load_builtin
from enginehouse.fetch.pypi import Limits, Python, check_requirement, failure, uv_environment

SMALL = load_builtin().backends[1].requirements[1]  # pykdtree, half a megabyte
ZEROS = "--hash=sha256:" + "0" * 64


def silent(done: int, total: int) -> None:
    """Progress that nobody hears."""


@pytest.fixture
async def environment(tmp_path: Path) -> Path:
    directory = tmp_path / "with space" / "venv"
    directory.parent.mkdir()
    await Python(os.environ).make_environment(directory)
    return directory


async def test_an_environment_still_works_after_it_was_moved(environment: Path) -> None:
    seen: list[int] = []
    await Python(os.environ).install(
        environment, [SMALL], size_bytes=1_000_000, progress=lambda done, total: seen.append(done)
    )
    assert seen == sorted(seen)
    assert seen[-1] == 1_000_000
    moved = environment.with_name("moved")
    environment.rename(moved)
    script = "import importlib.metadata as m, sys; print(m.version('pykdtree'), sys.prefix)"
    process = await asyncio.create_subprocess_exec(
        moved / "bin" / "python", "-I", "-c", script, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert output.decode().split(maxsplit=1) == ["1.4.3", f"{moved}\n"]


@pytest.mark.parametrize(
    ("requirement", "kind", "code"),
    [
        (f"pykdtree==1.4.3 {ZEROS}", Hopeless, "digest_mismatch"),
        (f"pykdtree==99.1 {ZEROS}", Hopeless, "not_found"),
        (f"enginehouse-no-such-package==1 {ZEROS}", Hopeless, "not_found"),
        (f"pywin32==312 {ZEROS}", Hopeless, "unsupported_platform"),
        ("pykdtree==1.4.3", Invalid, "invalid_uri"),
    ],
)
async def test_a_package_that_cannot_be_had_is_told_in_one_sentence(
    environment: Path, requirement: str, kind: type[EnginehouseError], code: str
) -> None:
    with pytest.raises(kind) as caught:
        await Python(os.environ).install(environment, [requirement], size_bytes=1, progress=silent)
    assert caught.value.code == code
    assert caught.value.message.startswith("cannot ")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("how", [{"UV_OFFLINE": "1"}, {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple"}])
async def test_no_network_may_heal_and_says_what_to_check(
    environment: Path, tmp_path: Path, how: dict[str, str]
) -> None:
    told = os.environ | {"UV_CACHE_DIR": str(tmp_path / "cache"), "UV_HTTP_RETRIES": "0"} | how
    with pytest.raises(Upstream, match="check the network, or set UV_INDEX_URL or PIP_INDEX_URL"):
        await Python(told).install(environment, [SMALL], size_bytes=1, progress=silent)


async def serve_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An index that takes the question and never answers."""
    await reader.read()
    writer.close()


async def test_an_index_that_never_answers_is_given_up_and_no_process_is_left(
    environment: Path, tmp_path: Path
) -> None:
    server = await asyncio.start_server(serve_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    told = os.environ | {
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "UV_DEFAULT_INDEX": f"http://127.0.0.1:{port}/simple",
    }
    async with server:
        with pytest.raises(Upstream) as caught:
            await Python(told, limits=Limits(stall_seconds=0.5)).install(
                environment, [SMALL], size_bytes=1, progress=silent
            )
        assert caught.value.code == "stalled"
        assert not children()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(Python(told).install(environment, [SMALL], size_bytes=1, progress=silent))
            while not children():  # noqa: ASYNC110 - the limit of the test run is the limit
                await asyncio.sleep(0.01)
            task.cancel()
        assert not children()


def children() -> list[str]:
    return [
        child.name()
        for child in psutil.Process().children(recursive=True)
        # The tests' own registry may be running beside.
        if child.status() != psutil.STATUS_ZOMBIE and child.name() != "docker-registry"
    ]


@pytest.mark.parametrize(
    "line",
    [
        "a",
        "a==1",
        f"a>=1 {ZEROS}",
        f"--index-url=http://evil a==1 {ZEROS}",
        f"a==1 {ZEROS} --pre",
        f"a==1 {ZEROS}\nb==2 {ZEROS}",
        f"a==1; python_version > '3' {ZEROS}",
        f"a[extra]==1 {ZEROS}",
        f"a @ http://evil/a.whl {ZEROS}",
        f"-r other.txt {ZEROS}",
        f"-e==1 {ZEROS}",
        f"a==1 --hash=sha256:{'g' * 64}",
        f"a==1 --hash=md5:{'0' * 32}",
        f"a==1 {ZEROS} # comment",
    ],
)
def test_nothing_can_be_smuggled_into_a_requirement(line: str) -> None:
    """F-110."""
    with pytest.raises(Invalid):
        check_requirement(line)


def test_a_pinned_and_hashed_requirement_is_taken() -> None:
    assert check_requirement(f"A.b-c_d==1.0+local.1 {ZEROS} {ZEROS}")


def test_uv_is_told_how_to_reach_the_index_and_no_secret() -> None:
    told = uv_environment(
        {
            "PATH": "p",
            "HOME": "h",
            "https_proxy": "x",
            "HTTPS_PROXY": "x",
            "SSL_CERT_FILE": "c",
            "XDG_CACHE_HOME": "d",
            "UV_INDEX_URL": "i",
            "UV_CACHE_DIR": "e",
            "ENGINEHOUSE_TOKEN": "secret",
            "LOCALAI_REGISTRATION_TOKEN": "secret",
            "UV_PUBLISH_TOKEN": "secret",
            "UV_CONSTRAINT": "other.txt",
            "VIRTUAL_ENV": "/somewhere",
            "PYTHONPATH": "/somewhere",
        }
    )
    assert "secret" not in told.values()
    assert set(told) == {
        "PATH",
        "HOME",
        "https_proxy",
        "HTTPS_PROXY",
        "SSL_CERT_FILE",
        "XDG_CACHE_HOME",
        "UV_INDEX_URL",
        "UV_CACHE_DIR",
        "UV_NO_PROGRESS",
        "UV_PYTHON_DOWNLOADS",
    }
    assert told["UV_PYTHON_DOWNLOADS"] == "never"


def test_pip_settings_count_where_uv_has_none() -> None:
    assert uv_environment({"PIP_INDEX_URL": "mirror"})["UV_DEFAULT_INDEX"] == "mirror"
    told = uv_environment({"PIP_INDEX_URL": "mirror", "UV_INDEX_URL": "own"})
    assert "UV_DEFAULT_INDEX" not in told
    assert uv_environment({"PIP_EXTRA_INDEX_URL": "more"})["UV_EXTRA_INDEX_URL"] == "more"


def test_a_full_disk_may_heal() -> None:
    output = (
        "error: Failed to install: x.whl\n  cause: Failed to copy\n"
        "  cause: failed to copy file from a to b: No space left on device (os error 28)\n"
    )
    error = failure("x==1", output)
    assert isinstance(error, Unavailable)
    assert error.code == "insufficient_disk"


def test_a_certificate_that_is_not_trusted_is_named() -> None:
    output = (
        "error: Failed to fetch: https://index/simple/x/\n  cause: error sending request for url\n"
        "  cause: client error (Connect)\n  cause: invalid peer certificate: UnknownIssuer\n"
    )
    error = failure("x==1", output)
    assert isinstance(error, Upstream)
    assert "set SSL_CERT_FILE" in error.message


def test_what_nobody_foresaw_is_told_by_its_cause() -> None:
    error = failure("x==1", "error: Failed to initialize cache at `/proc/x`\n  cause: failed to create it\n")
    assert error.message == "cannot install x==1: failed to create it"
    assert failure("x==1", "").message == "cannot install x==1: uv gave no reason"


async def test_the_interpreter_of_an_environment_is_ours(environment: Path) -> None:
    config = (environment / "pyvenv.cfg").read_text()
    assert f"{sys.version_info.major}.{sys.version_info.minor}." in config
