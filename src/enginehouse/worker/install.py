"""Installs backends: built beside, checked, synced, swapped in at the end.

The old version is given up only after the new one is complete, proven to start and in place; whatever fails before
that changes nothing and leaves nothing. Nothing here stops processes: whoever has to is called back between swap and
clean-up. Callers hold the lock of the directory.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from msgspec import Struct

from enginehouse.core.backend import Resolved, check_resolved, package_digest
from enginehouse.core.errors import Hopeless, Invalid, Unavailable
from enginehouse.core.installation import (
    METADATA_FILE,
    RUN_FILE,
    STAGING,
    Metadata,
    check_directory,
    encode_metadata,
    metadata_for,
)
from enginehouse.core.name import check_name
from enginehouse.core.progress import Phase
from enginehouse.fetch.galleries import builtin_directory
from enginehouse.fetch.pypi import Python
from enginehouse.host import disk, processes
from enginehouse.worker.threads import in_thread
from enginehouse.worker.trees import Trees, now

Report = Callable[[Phase, str, int, int], None]  # phase, file, bytes done, bytes in all
Swapped = Callable[[], Awaitable[None]]  # called when the new tree is in place and the old one still on disk

CHECK_SECONDS = 60.0  # an import takes 0.1 s; on a cold disk under load much longer
SPARE_BYTES = 64 * 1024 * 1024  # a disk filled to the last byte stops the machine, not only us
_RUN_SCRIPT = b"""#!/bin/sh
# Made by enginehouse at install; the engine must replace this shell, so that signals reach it.
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd -P) || exit 1
if [ -d "$here/lib" ]; then
    LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    export LD_LIBRARY_PATH
fi
exec "$here/venv/bin/python" -I "$here/launcher.py" "$@"
"""


class InstallWish(Struct, frozen=True, kw_only=True):
    resolved: Resolved
    generation: int = 0
    force: bool = False


class Installer:
    def __init__(self, trees: Trees, python: Python, environment: Mapping[str, str]) -> None:
        """`environment` is ours; engines are told only what they need of it."""
        self._trees = trees
        self._python = python
        self._environment = processes.engine_environment(environment)

    async def install(self, wish: InstallWish, report: Report, swapped: Swapped) -> None:
        """Make `wish` true. What is already so costs a look and a note of the generation."""
        resolved = _checked(wish.resolved)
        try:
            self._trees.check_pointer(resolved)
            if not wish.force and await in_thread(self._trees.is_installed, resolved):
                await in_thread(self._trees.record, resolved.directory, wish.generation)
                await in_thread(self._trees.point, resolved)
                return
            try:
                await self._build(wish, report)
                await in_thread(self._trees.swap_in, resolved.directory)
                await in_thread(self._trees.point, resolved)
                await swapped()
            finally:
                await in_thread(self._trees.discard, resolved.directory)
        except OSError as error:
            raise disk.storage_error(error, f"install {resolved.directory}") from error

    async def remove(self, directory: str) -> None:
        """Remove a backend and the meta names that point to it; nothing there is fine."""
        try:
            await in_thread(self._trees.remove, directory)
        except OSError as error:
            raise disk.storage_error(error, f"delete {directory}") from error

    async def _build(self, wish: InstallWish, report: Report) -> None:
        """The new tree in staging: complete, proven to run, synced."""
        resolved = wish.resolved
        staging = self._trees.staging_of(resolved.directory)
        report("resolving", "", 0, resolved.size_bytes)
        await in_thread(disk.remove_tree, staging)
        await in_thread(_check_room, self._trees.backends, resolved)
        await in_thread(staging.mkdir, 0o750)
        await self._python.make_environment(staging / "venv")
        await self._python.install(
            staging / "venv",
            resolved.requirements,
            size_bytes=resolved.size_bytes,
            progress=lambda done, total: report("downloading", resolved.uri, done, total),
        )
        report("extracting", resolved.uri, resolved.size_bytes, resolved.size_bytes)
        await in_thread(_write_files, staging, metadata_for(resolved, wish.generation, now()), resolved.launcher)
        await self._check_runs(staging, resolved)
        await in_thread(disk.sync_tree, staging)

    async def _check_runs(self, staging: Path, resolved: Resolved) -> None:
        code, told = await self._ask(staging)
        # A slim machine: a package's copy is used, and only then, because the system keeps its own up to date.
        if code and "libgomp" in told and await in_thread(link_libgomp, staging):
            code, told = await self._ask(staging)
        if not code:
            return
        if code == -signal.SIGILL:
            told = "it needs a processor with AVX2, which this machine does not have"
        elif code < 0:
            told = f"it was ended by {signal.Signals(-code).name}"
        raise Hopeless(
            f"cannot install {resolved.directory}: {told or f'its check ended with code {code}'}",
            code="unsupported_platform",
        )

    async def _ask(self, staging: Path) -> tuple[int, str]:
        try:
            return await processes.run_briefly(
                [str(staging / RUN_FILE), "--check"],
                directory=staging,
                environment=self._environment,
                limit_seconds=CHECK_SECONDS,
            )
        except TimeoutError as error:
            raise Unavailable(
                f"cannot install {staging.name.removesuffix(STAGING)}: it did not start within {CHECK_SECONDS:.0f} s",
                code="stalled",
            ) from error


def _checked(resolved: Resolved) -> Resolved:
    """The bus is not trusted: names, source and digest are checked before anything is touched."""
    check_resolved(resolved)
    check_directory(resolved.directory)
    if resolved.meta:
        check_directory(resolved.meta)
    if not resolved.uri.startswith("pypi:") or not resolved.requirements:
        raise Invalid(
            f"cannot install {resolved.directory} from {resolved.uri[:80]!r}: "
            "this worker installs Python packages (pypi:) with pinned requirements",
            code="unsupported",
        )
    digest = package_digest(resolved.uri, resolved.requirements, resolved.launcher, resolved.version)
    if digest != resolved.digest:
        raise Hopeless(
            f"cannot install {resolved.directory}: its description has the digest {digest}, not {resolved.digest}",
            code="digest_mismatch",
        )
    _launcher(resolved.launcher)
    return resolved


def _launcher(name: str) -> bytes:
    check_name(name, "launcher")
    file = builtin_directory().joinpath("launchers", f"{name}.py")
    if not file.is_file():
        raise Invalid(f"cannot start a backend with {name!r}: this worker has no such launcher", code="unsupported")
    return file.read_bytes()


def _check_room(backends: Path, resolved: Resolved) -> None:
    free = disk.free_bytes(backends)
    if free < resolved.size_bytes + SPARE_BYTES:
        raise Unavailable(
            f"cannot install {resolved.directory}: it needs {resolved.size_bytes // 2**20} MiB and "
            f"{free // 2**20} MiB are free; free some, it goes on by itself",
            code="insufficient_disk",
        )


def _write_files(staging: Path, metadata: Metadata, launcher: str) -> None:
    (staging / "launcher.py").write_bytes(_launcher(launcher))
    (staging / RUN_FILE).write_bytes(_RUN_SCRIPT)
    (staging / RUN_FILE).chmod(0o750)
    (staging / METADATA_FILE).write_bytes(encode_metadata(metadata))
    (staging / METADATA_FILE).chmod(0o644)


def link_libgomp(tree: Path) -> bool:
    """Offer the libgomp of a package to the engine, by a link that survives the rename of `tree`."""
    for library in sorted(tree.glob("venv/lib/python*/site-packages/*.libs/libgomp-*.so*")):
        (tree / "lib").mkdir(exist_ok=True)
        (tree / "lib" / "libgomp.so.1").symlink_to(Path("..") / library.relative_to(tree))
        return True
    return False
