"""Python packages into environments of their own, by uv: engines from a package index, and models inside wheels.

uv runs with a chosen environment (no secret of ours), outside any project, with validated requirement lines only:
pinned, hashed, wheels only, no dependency that was not listed. Whatever goes wrong leaves as one of our errors in one
sentence. Nothing here decides where a finished tree goes; half-made ones are the caller's to remove.
"""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import uv
from msgspec import Struct

from enginehouse.core.errors import EnginehouseError, Hopeless, Invalid, Unavailable, Upstream

ReportBytes = Callable[[int, int], None]  # bytes done, bytes in all

_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?==[0-9][A-Za-z0-9.!+_-]*")
_REQUIREMENT = re.compile(_PACKAGE.pattern + r"(?: +--hash=sha256:[0-9a-f]{64})+")
# Wheels only: building from source would run whatever the source says.
_INSTALL = ("pip", "install", "--quiet", "--only-binary", ":all:")
_HASHED = ("--no-deps", "--require-hashes")
_POLL_SECONDS = 0.1
_SHOWN_OUTPUT_BYTES = 64 * 1024
_VARIABLES = {"PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LC_CTYPE", "USER", "SYSTEMROOT"}
_PREFIXES = (
    "XDG_",
    "SSL_",
    "UV_CACHE_DIR",
    "UV_CONCURRENT_",
    "UV_CONFIG_FILE",
    "UV_DEFAULT_INDEX",
    "UV_EXTRA_INDEX_URL",
    "UV_FIND_LINKS",
    "UV_HTTP_",
    "UV_INDEX",
    "UV_INSECURE_HOST",
    "UV_KEYRING_PROVIDER",
    "UV_LINK_MODE",
    "UV_NATIVE_TLS",
    "UV_NO_CACHE",
    "UV_OFFLINE",
    "UV_REQUEST_TIMEOUT",
    "UV_SYSTEM_CERTS",
)
_PROXIES = {"http_proxy", "https_proxy", "all_proxy", "no_proxy"}
# Settings of pip that mean the same to uv, which does not read them: used where uv's own are not set.
_FROM_PIP = (
    ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", ("UV_DEFAULT_INDEX", "UV_INDEX_URL")),
    ("PIP_EXTRA_INDEX_URL", "UV_EXTRA_INDEX_URL", ("UV_INDEX", "UV_EXTRA_INDEX_URL")),
    ("PIP_CERT", "SSL_CERT_FILE", ("SSL_CERT_FILE",)),
)


class Limits(Struct, frozen=True):
    """How long uv may take. `stall_seconds` counts from the last byte written, where the system tells."""

    stall_seconds: float = 120.0
    total_seconds: float = 3600.0


class Python:
    """Installs packages with uv. `before_exec` runs in the child, so that it can be made to die with its parent."""

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        limits: Limits | None = None,
        before_exec: Callable[[], None] | None = None,
    ) -> None:
        self._environment = uv_environment(environment)
        self._limits = limits or Limits()
        self._before_exec = before_exec

    async def make_environment(self, directory: Path) -> None:
        """A relocatable environment for the interpreter that runs us, so it still works after a rename."""
        await self._run(
            ["venv", "--quiet", "--relocatable", "--python", sys.executable, str(directory)],
            what=f"the environment for {directory.parent.name}",
        )

    async def install(
        self, directory: Path, requirements: Sequence[str], *, size_bytes: int, progress: ReportBytes
    ) -> None:
        """Put `requirements`, and nothing else, into the environment in `directory`.

        Their modules, that is: engines are started by their launcher, never by a script of a package.
        """
        await self._install(_into(directory), requirements, size_bytes, progress)

    async def install_package(self, directory: Path, package: str, *, size_bytes: int, progress: ReportBytes) -> None:
        """A package without hashes, with whatever it depends on: the index is trusted, as whoever asked chose to."""
        # After `--`, so that nothing in it can be an option.
        command = [*_INSTALL, *_into(directory), "--", check_package(package)]
        await self._run(command, what=package, heard=_Heard(size_bytes, progress))
        progress(size_bytes, size_bytes)

    async def file_from_package(
        self, requirement: str, inner: str, target: Path, *, size_bytes: int, progress: ReportBytes
    ) -> None:
        """The file `inner` of a package, moved to `target`. It is not verified here beyond the hash of its package."""
        path = PurePosixPath(inner)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise Invalid(f"cannot take {inner!r} out of a package: it must be a path inside it", code="invalid_uri")
        place = Path(tempfile.mkdtemp(prefix=".package-", dir=target.parent))
        try:
            await self._install(
                ["--target", str(place), "--python", sys.executable], [requirement], size_bytes, progress
            )
            await asyncio.to_thread(_take, place, path, target, requirement)
        finally:
            await asyncio.to_thread(shutil.rmtree, place, True)

    async def _install(
        self, where: list[str], requirements: Sequence[str], size_bytes: int, progress: ReportBytes
    ) -> None:
        lines = [check_requirement(line) for line in requirements]
        with tempfile.NamedTemporaryFile("w", prefix="enginehouse-", suffix=".txt") as file:
            file.write("\n".join(lines) + "\n")
            file.flush()
            what, heard = lines[0].split()[0] if lines else "nothing", _Heard(size_bytes, progress)
            try:
                # Pinned and hashed, so what the cache has is as good as anything the index could give: no question to
                # the index, which takes longer than the install, and no need for a network.
                await self._run([*_INSTALL, *_HASHED, "--offline", *where, "-r", file.name], what=what, heard=heard)
            except EnginehouseError:
                await self._run([*_INSTALL, *_HASHED, *where, "-r", file.name], what=what, heard=heard)
        progress(size_bytes, size_bytes)

    async def _run(self, arguments: list[str], *, what: str, heard: _Heard | None = None) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                uv.find_uv_bin(),
                *arguments,
                # Outside every project, whose settings uv would take.
                cwd="/",
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                preexec_fn=self._before_exec,
            )
        except OSError as error:
            raise Hopeless(
                f"cannot install {what}: uv cannot be started ({error}); install the Python package uv", code="internal"
            ) from error
        try:
            output = await self._wait(process, what, heard)
        finally:
            # Also when cancelled: what uv started must not go on writing.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            raise failure(what, output)

    async def _wait(self, process: asyncio.subprocess.Process, what: str, heard: _Heard | None) -> str:
        assert process.stderr is not None
        output = bytearray()
        written, moved_at = 0, asyncio.get_running_loop().time()
        end = moved_at + self._limits.total_seconds
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):
                    while chunk := await process.stderr.read(4096):
                        output += chunk[: max(0, _SHOWN_OUTPUT_BYTES - len(output))]
                    await process.wait()
                    return output.decode("utf-8", "replace")
            now = asyncio.get_running_loop().time()
            if (seen := _written_bytes(process.pid)) != written:
                written, moved_at = seen, now
                if heard is not None:
                    heard.tell(seen)
            if now > end or now - moved_at > self._limits.stall_seconds:
                raise Upstream(
                    f"cannot install {what}: nothing moved for {now - moved_at:.0f} s; check the network",
                    code="stalled",
                )


def _into(directory: Path) -> list[str]:
    # Ours is the same interpreter, and uv knows it already; it would examine a new one for longer than it installs.
    # Outside an environment a distribution may have moved the directories of its own Python.
    is_same = sys.prefix != sys.base_prefix
    return ["--python", sys.executable, "--prefix", str(directory)] if is_same else ["--python", str(directory)]


class _Heard:
    """Bytes written, told as progress: they never fall and never pass the announced size."""

    def __init__(self, size_bytes: int, progress: ReportBytes) -> None:
        self._size_bytes = size_bytes
        self._progress = progress
        self._told = 0

    def tell(self, written: int) -> None:
        self._told = max(self._told, min(written, self._size_bytes))
        self._progress(self._told, self._size_bytes)


def check_package(text: str) -> str:
    """`text` itself, if it is NAME==VERSION and nothing else."""
    if not _PACKAGE.fullmatch(text):
        raise Invalid(f"cannot use {text[:60]!r} as a package: it must be NAME==VERSION", code="invalid_uri")
    return text


def check_requirement(line: str) -> str:
    """`line` itself, if it is NAME==VERSION with hashes and nothing else: no option or URL can be smuggled in."""
    if not _REQUIREMENT.fullmatch(line):
        raise Invalid(
            f"cannot use {line[:60]!r} as a requirement: it must be NAME==VERSION --hash=sha256:…", code="invalid_uri"
        )
    return line


def uv_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What uv may know of our environment: how to reach the index, where its cache is."""
    chosen = {
        name: value
        for name, value in environment.items()
        if name in _VARIABLES or name.startswith(_PREFIXES) or name.lower() in _PROXIES
    }
    for name, same, taken in _FROM_PIP:
        if environment.get(name) and not any(environment.get(other) for other in taken):
            chosen[same] = environment[name]
    chosen["UV_PYTHON_DOWNLOADS"] = "never"
    chosen["UV_NO_PROGRESS"] = "1"
    return chosen


def failure(what: str, output: str) -> EnginehouseError:
    """uv's words as one of our errors. Only an index that cannot be reached and a full disk may heal by themselves."""
    text = output.lower()
    if "no space left" in text or "disk quota" in text:
        return Unavailable(
            f"cannot install {what}: no space left on the disk; free some, it goes on by itself",
            code="insufficient_disk",
        )
    if "hash mismatch" in text:
        return Hopeless(
            f"cannot install {what}: what the package index gave does not have the expected sha256",
            code="digest_mismatch",
        )
    if "matching platform tag" in text or "no usable wheels" in text or "matching python" in text:
        return Hopeless(
            f"cannot install {what}: there is no build of it for this machine and Python "
            f"{sys.version_info.major}.{sys.version_info.minor}",
            code="unsupported_platform",
        )
    if (
        "network was disabled" in text
        or "failed to fetch" in text
        or "request failed" in text
        or "sending request" in text
    ):
        return Upstream(
            f"cannot install {what}: the package index cannot be reached; "
            "check the network, or set UV_INDEX_URL or PIP_INDEX_URL to an index that can",
            code="upstream_error",
        )
    if "there is no version" in text or "not found in the package registry" in text:
        return Hopeless(f"cannot install {what}: the package index does not have it", code="not_found")
    if "failed to download" in text:
        return Upstream(f"cannot install {what}: the download broke off; check the network", code="upstream_error")
    lines = [line.removeprefix("error: ").strip() for line in output.splitlines() if line.strip()]
    causes = [line.removeprefix("cause: ") for line in lines if line.startswith("cause: ")]
    told = (causes or lines or ["uv gave no reason"])[-1]
    return Hopeless(f"cannot install {what}: {told[:300]}", code="internal")


def _written_bytes(pid: int) -> int:
    """Bytes that a live process has written so far, where the system tells."""
    try:
        for line in Path(f"/proc/{pid}/io").read_text().splitlines():
            if line.startswith("wchar:"):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0


def _take(place: Path, inner: PurePosixPath, target: Path, requirement: str) -> None:
    source = place.joinpath(inner)
    if not source.is_file() or source.is_symlink():
        raise Hopeless(f"cannot find {inner} in {requirement.split()[0]}", code="not_found")
    # uv links files to its cache: a copy of our own, so that nobody's cache can change under a running model.
    with source.open("rb") as reader, target.open("wb") as writer:
        shutil.copyfileobj(reader, writer, 1024 * 1024)
        writer.flush()
        os.fsync(writer.fileno())
