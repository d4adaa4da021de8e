"""Places backends: built beside, checked, synced, swapped in at the end. The only writer below `backends/`.

At every instant a backend's directory is the whole old version, the whole new one or absent; a failure or a kill at
any step leaves only directories with a suffix, which `recover` clears at the next start of the worker. Callers hold the
lock of the directory. Nothing here stops processes: whoever has to is called back between swap and clean-up.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from enginehouse.core.backend import InstalledBackend, Resolved, check_resolved, package_digest
from enginehouse.core.errors import Conflict, EnginehouseError, Hopeless, Invalid, Unavailable
from enginehouse.core.installation import (
    BACKUP,
    METADATA_FILE,
    OLD_BACKUP,
    RUN_FILE,
    STAGING,
    Found,
    Metadata,
    check_directory,
    decode_metadata,
    encode_metadata,
    listing,
    metadata_for,
    pointer_for,
    target_of,
)
from enginehouse.core.name import check_name
from enginehouse.core.progress import Phase
from enginehouse.fetch.galleries import builtin_directory
from enginehouse.fetch.pypi import Python
from enginehouse.host import disk, processes

Report = Callable[[Phase, str, int, int], None]  # phase, file, bytes done, bytes in all
Swapped = Callable[[], Awaitable[None]]  # the new tree is in place, the old one is still on disk

CHECK_SECONDS = 60.0  # an import takes 0.1 s; a cold disk under load may take much longer
SPARE_BYTES = 64 * 1024 * 1024  # a disk filled to the last byte stops the machine, not only us
_RUN_SCRIPT = b"""#!/bin/sh
# Made by enginehouse at install; the process must replace this shell.
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
    """Installs into and removes from one `backends` directory. `environment` is what programs may be told of ours."""

    def __init__(self, backends: Path, python: Python, environment: dict[str, str]) -> None:
        self._backends = backends
        self._python = python
        self._environment = processes.engine_environment(environment)

    async def install(self, wish: InstallWish, report: Report, swapped: Swapped) -> None:
        """Make `wish` true. What is already so costs a look and the generation's record."""
        resolved = _checked(wish.resolved)
        current = self._backends / resolved.directory
        staging = self._backends / (resolved.directory + STAGING)
        try:
            if not wish.force and await asyncio.to_thread(self._is_installed, resolved):
                await asyncio.to_thread(self._record, wish)
                return
            try:
                await self._build(wish, staging, report)
                await asyncio.to_thread(_swap, staging, current)
                await asyncio.to_thread(self._point, resolved)
                await swapped()
            finally:
                # After a success this is the old tree; after anything else the unfinished new one.
                await asyncio.to_thread(disk.remove_tree, staging)
                await asyncio.to_thread(disk.remove_tree, self._backends / (resolved.directory + BACKUP))
        except OSError as error:
            raise disk.storage_error(error, f"install {resolved.directory}") from error

    async def remove(self, directory: str) -> None:
        """Remove a backend and the meta names that point to it; nothing there is fine."""
        check_directory(directory)
        try:
            await asyncio.to_thread(self._remove, directory)
        except OSError as error:
            raise disk.storage_error(error, f"delete {directory}") from error

    def list_installed(self) -> tuple[InstalledBackend, ...]:
        """What is there. Blocks; a directory that cannot be read hides nothing but itself."""
        return listing(_look(path) for path in self._directories())

    def inode_of(self, directory: str) -> int | None:
        """What tells a tree from the one that replaced it under the same name."""
        try:
            return (self._backends / check_directory(directory)).stat().st_ino
        except OSError:
            return None

    def recover(self) -> None:
        """Finish or undo what a killed worker left: afterwards no directory with a suffix is there. Blocks."""
        for path in self._directories():
            belongs = target_of(path.name)
            if belongs is None:
                continue
            name, suffix = belongs
            target = self._backends / name
            if suffix in (BACKUP, OLD_BACKUP) and not (target / RUN_FILE).is_file() and (path / RUN_FILE).is_file():
                disk.remove_tree(target)
                path.rename(target)
        for path in self._directories():
            if target_of(path.name) is not None:
                disk.remove_tree(path)
        disk.sync_directory(self._backends)

    def _directories(self) -> list[Path]:
        return [path for path in sorted(self._backends.iterdir()) if path.is_dir() and not path.is_symlink()]

    def _is_installed(self, resolved: Resolved) -> bool:
        found = _look(self._backends / resolved.directory)
        metadata = decode_metadata(found.metadata) if found.metadata else None
        return found.has_run_file and metadata is not None and metadata.digest == resolved.digest

    def _record(self, wish: InstallWish) -> None:
        path = self._backends / wish.resolved.directory / METADATA_FILE
        metadata = decode_metadata(path.read_bytes())
        if metadata is not None and metadata.generation < wish.generation:
            disk.write_atomic(path, encode_metadata(msgspec.structs.replace(metadata, generation=wish.generation)))
        self._point(wish.resolved)

    async def _build(self, wish: InstallWish, staging: Path, report: Report) -> None:
        """The new tree, complete and proven to run, in `staging`."""
        resolved = wish.resolved
        report("resolving", "", 0, resolved.size_bytes)
        await asyncio.to_thread(disk.remove_tree, staging)
        await asyncio.to_thread(_check_room, self._backends, resolved)
        await asyncio.to_thread(staging.mkdir, 0o750)
        await self._python.make_environment(staging / "venv")
        await self._python.install(
            staging / "venv",
            resolved.requirements,
            size_bytes=resolved.size_bytes,
            progress=lambda done, total: report("downloading", resolved.uri, done, total),
        )
        report("extracting", resolved.uri, resolved.size_bytes, resolved.size_bytes)
        await asyncio.to_thread(
            _write_files, staging, metadata_for(resolved, wish.generation, _now()), resolved.launcher
        )
        await self._check_runs(staging, resolved)
        await asyncio.to_thread(disk.sync_tree, staging)

    async def _check_runs(self, staging: Path, resolved: Resolved) -> None:
        code, told = await self._ask(staging)
        # A slim machine: the copy that a package brought is used, and only then, because the system's own is kept up to date.
        if code and "libgomp" in told and await asyncio.to_thread(link_libgomp, staging):
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

    def _point(self, resolved: Resolved) -> None:
        """The directory of the meta name, which holds nothing but metadata."""
        if not resolved.meta or resolved.meta == resolved.directory:
            return
        pointer = self._backends / resolved.meta
        if (pointer / RUN_FILE).exists():
            raise Conflict(
                f"cannot let {resolved.meta} stand for {resolved.directory}: a backend of that name is installed; delete it"
            )
        found = _look(pointer)
        known = decode_metadata(found.metadata) if found.metadata else None
        if known is None or (known.meta_backend_for, known.version) != (resolved.directory, resolved.version):
            pointer.mkdir(mode=0o750, exist_ok=True)
            disk.write_atomic(pointer / METADATA_FILE, encode_metadata(pointer_for(resolved, _now())))

    def _remove(self, directory: str) -> None:
        # Pointers first: a crash between the two leaves a backend without a meta name, not a name that leads nowhere.
        for backend in self.list_installed():
            if backend.is_meta and backend.meta_backend_for == directory:
                disk.remove_tree(self._backends / backend.name)
        target = self._backends / directory
        going = self._backends / (directory + STAGING)
        disk.remove_tree(going)
        if target.exists():
            target.rename(going)
            disk.sync_directory(self._backends)
            disk.remove_tree(going)


def _checked(resolved: Resolved) -> Resolved:
    """The bus is not trusted: names, source and digest are checked before anything is touched."""
    check_resolved(resolved)
    check_directory(resolved.directory)
    if resolved.meta:
        check_directory(resolved.meta)
    if not resolved.uri.startswith("pypi:") or not resolved.requirements:
        raise Invalid(
            f"cannot install {resolved.directory} from {resolved.uri[:80]!r}: this worker installs from pypi: with requirements",
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
            f"cannot install {resolved.directory}: it needs {resolved.size_bytes // 2**20} MiB and {free // 2**20} MiB "
            "are free; free some, it goes on by itself",
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


def _swap(staging: Path, current: Path) -> None:
    """Put the tree in `staging` in the place of `current`. The old one ends under a name with a suffix."""
    if not current.exists():
        staging.rename(current)
    elif not disk.exchange(staging, current):
        # Two steps, with an instant where neither is in place; `recover` puts the old one back after a kill there.
        backup = current.with_name(current.name + BACKUP)
        disk.remove_tree(backup)
        current.rename(backup)
        try:
            staging.rename(current)
        except OSError:
            backup.rename(current)
            raise
    disk.sync_directory(current.parent)


def _look(path: Path) -> Found:
    metadata: bytes | None
    try:
        metadata = (path / METADATA_FILE).read_bytes()
    except FileNotFoundError:
        metadata = None
    except OSError:
        metadata = b""
    return Found(name=path.name, metadata=metadata, has_run_file=(path / RUN_FILE).is_file())


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


__all__ = ["EnginehouseError", "InstallWish", "Installer", "Report", "Swapped", "link_libgomp"]
