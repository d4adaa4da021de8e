"""The directories of installed backends: what is there, and the few steps that change it.

The only writer of `backends/`. At every instant a backend's directory is the whole old version, the whole new one or
absent; a kill at any step leaves only directories with a suffix, which `recover` clears at the next start. Everything
blocks, and callers hold the lock of the directory.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import msgspec

from enginehouse.core.backend import InstalledBackend, Resolved
from enginehouse.core.errors import Conflict
from enginehouse.core.installation import (
    BACKUP,
    METADATA_FILE,
    OLD_BACKUP,
    RUN_FILE,
    STAGING,
    Found,
    check_directory,
    decode_metadata,
    encode_metadata,
    listing,
    pointer_for,
    target_of,
)
from enginehouse.host import disk


class Trees:
    def __init__(self, backends: Path) -> None:
        self.backends = backends

    def path_of(self, directory: str) -> Path:
        return self.backends / check_directory(directory)

    def staging_of(self, directory: str) -> Path:
        return self.backends / (check_directory(directory) + STAGING)

    def list_installed(self) -> tuple[InstalledBackend, ...]:
        """What is there; a directory that cannot be read hides nothing but itself."""
        return listing(_look(path) for path in self._directories())

    def inode_of(self, directory: str) -> int | None:
        """What tells a tree from the one that replaced it under the same name."""
        try:
            return self.path_of(directory).stat().st_ino
        except OSError:
            return None

    def is_installed(self, resolved: Resolved) -> bool:
        found = _look(self.path_of(resolved.directory))
        metadata = decode_metadata(found.metadata) if found.metadata else None
        return found.has_run_file and metadata is not None and metadata.digest == resolved.digest

    def record(self, directory: str, generation: int) -> None:
        """Note that a wish of this generation found what it wanted."""
        path = self.path_of(directory) / METADATA_FILE
        metadata = decode_metadata(path.read_bytes())
        if metadata is not None and metadata.generation < generation:
            disk.write_atomic(path, encode_metadata(msgspec.structs.replace(metadata, generation=generation)))

    def forget_generations(self) -> None:
        """For a worker that has become another node: what was applied was counted by another house."""
        for path in self._directories():
            found = _look(path)
            metadata = decode_metadata(found.metadata) if found.metadata else None
            if metadata is not None and metadata.generation:
                fresh = msgspec.structs.replace(metadata, generation=0)
                disk.write_atomic(path / METADATA_FILE, encode_metadata(fresh))

    def check_pointer(self, resolved: Resolved) -> None:
        """Refuse a meta name that is the directory of another backend."""
        if resolved.meta and resolved.meta != resolved.directory and (self.path_of(resolved.meta) / RUN_FILE).exists():
            raise Conflict(
                f"cannot let {resolved.meta} stand for {resolved.directory}: "
                "a backend of that name is installed; delete it first"
            )

    def point(self, resolved: Resolved) -> None:
        """The directory of the meta name, which holds nothing but metadata."""
        if not resolved.meta or resolved.meta == resolved.directory:
            return
        pointer = self.path_of(resolved.meta)
        found = _look(pointer)
        known = decode_metadata(found.metadata) if found.metadata else None
        if known is None or (known.meta_backend_for, known.version) != (resolved.directory, resolved.version):
            pointer.mkdir(mode=0o750, exist_ok=True)
            disk.write_atomic(pointer / METADATA_FILE, encode_metadata(pointer_for(resolved, now())))

    def swap_in(self, directory: str) -> None:
        """Put the finished staging tree in place. The old one ends under a name with a suffix."""
        current, staging = self.path_of(directory), self.staging_of(directory)
        if not current.exists():
            staging.rename(current)
        elif not disk.exchange(staging, current):
            # Two steps, with an instant where neither is in place; `recover` puts the old one back after a kill there.
            backup = self.backends / (directory + BACKUP)
            disk.remove_tree(backup)
            current.rename(backup)
            try:
                staging.rename(current)
            except OSError:
                backup.rename(current)
                raise
        disk.sync_directory(self.backends)

    def discard(self, directory: str) -> None:
        """Remove what a replacement leaves beside. The backup goes only when something is in its place."""
        disk.remove_tree(self.staging_of(directory))
        if self.path_of(directory).exists():
            disk.remove_tree(self.backends / (directory + BACKUP))

    def remove(self, directory: str) -> None:
        """A backend and the meta names that point to it; nothing there is fine."""
        # Pointers first: a kill between the two leaves a backend without a meta name, not a name that leads nowhere.
        for backend in self.list_installed():
            if backend.is_meta and backend.meta_backend_for == directory:
                disk.remove_tree(self.backends / backend.name)
        target, going = self.path_of(directory), self.staging_of(directory)
        disk.remove_tree(going)
        if target.exists():
            target.rename(going)
            disk.sync_directory(self.backends)
            disk.remove_tree(going)

    def recover(self) -> None:
        """Finish or undo what a killed worker left: afterwards no directory with a suffix is there."""
        for path in self._directories():
            belongs = target_of(path.name)
            if belongs is None or belongs[1] not in (BACKUP, OLD_BACKUP):
                continue
            target = self.backends / belongs[0]
            if (path / RUN_FILE).is_file() and not (target / RUN_FILE).is_file():
                disk.remove_tree(target)
                path.rename(target)
        for path in self._directories():
            if target_of(path.name) is not None:
                disk.remove_tree(path)
        disk.sync_directory(self.backends)

    def _directories(self) -> list[Path]:
        return [path for path in sorted(self.backends.iterdir()) if path.is_dir() and not path.is_symlink()]


def now() -> str:
    """RFC 3339, as LocalAI's metadata has it. For people: nothing is decided by it."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _look(path: Path) -> Found:
    metadata: bytes | None
    try:
        metadata = (path / METADATA_FILE).read_bytes()
    except FileNotFoundError:
        metadata = None
    except OSError:
        metadata = b""
    return Found(name=path.name, metadata=metadata, has_run_file=(path / RUN_FILE).is_file())
