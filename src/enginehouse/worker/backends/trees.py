"""The directories of installed backends: their paths, their metadata and the record of each install.

New trees are built in `.enginehouse/staging`; replaced ones move through `replaced` to `previous`. Only
`worker/backends/swap` moves them. Trees are distinguished by inode. An unreadable directory does not affect the others.
All methods block. Callers that change something hold the lock of the directory.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from enginehouse.core.backend import InstalledBackend, Resolved
from enginehouse.core.installation import (
    METADATA_FILE,
    PRIVATE,
    Found,
    InstallRecord,
    Metadata,
    SwapStep,
    Version,
    check_directory,
    decode_metadata,
    encode_metadata,
    listing,
    target_of,
)
from enginehouse.host import disk
from enginehouse.worker.backends.inspection import directories, inode, inspect
from enginehouse.worker.backends.pointers import Pointers, pointer_to


class Trees:
    def __init__(self, backends: Path, system: Path | None = None) -> None:
        self.backends = backends
        self.pointers = Pointers(backends)
        self._system = system

    @property
    def private(self) -> Path:
        return self.backends / PRIVATE

    def path_of(self, directory: str) -> Path:
        return self.backends / check_directory(directory)

    def staging_of(self, directory: str) -> Path:
        return self.private / "staging" / check_directory(directory)

    def previous_of(self, directory: str) -> Path:
        return self.private / "previous" / check_directory(directory)

    def replaced_of(self, directory: str) -> Path:
        return self.private / "replaced" / check_directory(directory)

    def make_directories(self) -> None:
        self.backends.mkdir(mode=0o750, parents=True, exist_ok=True)
        for name in ("staging", "replaced", "previous", "state"):
            (self.private / name).mkdir(mode=0o750, parents=True, exist_ok=True)

    def list_installed(self) -> tuple[InstalledBackend, ...]:
        """List the installed and system backends; an unreadable directory does not affect the others."""
        system = [inspect(path) for path in directories(self._system)] if self._system is not None else []
        return listing([self._found(path) for path in self._installed()], system)

    def _found(self, path: Path) -> Found:
        # The inode is read before the record, because a tree is recorded before it is swapped in.
        number = inode(path)
        is_unsettled = number is not None and number == self._unsynced(path.name)
        # A directory that somebody else made may have a name that no backend can have; it has no previous version.
        previous = _started_by(self.private / "previous" / path.name)
        return msgspec.structs.replace(inspect(path), is_unsettled=is_unsettled, previous=previous)

    def every_tree(self) -> list[Path]:
        """All complete versions: first the installed ones, then the previous ones."""
        return [*self._installed(), *directories(self.private / "previous")]

    def lasting_trees(self) -> list[tuple[Path, int]]:
        """The complete and synced versions with their inodes: a new tree may share files with them."""
        # The inode is read before the record, because a tree is recorded before it is swapped in.
        found = [(path, number) for path in self.every_tree() if (number := inode(path)) is not None]
        return [(path, number) for path, number in found if number != self._unsynced(path.name)]

    def inode_of(self, directory: str) -> int | None:
        """The inode of a tree; it differs from that of a tree that replaced it. None if there is no tree."""
        return inode(self.path_of(directory))

    def metadata_of(self, directory: str) -> Metadata | None:
        """The metadata of a backend that can be started; None if there is none."""
        found = inspect(self.path_of(directory))
        return decode_metadata(found.metadata) if found.metadata and found.has_run_file else None

    def previous_metadata(self, directory: str) -> Metadata | None:
        return _started_by(self.previous_of(directory))

    def note(self, directory: str, metadata: Metadata) -> None:
        """Update the metadata of a backend whose tree stays."""
        disk.write_atomic(self.path_of(directory) / METADATA_FILE, encode_metadata(metadata))

    def forget_generations(self) -> None:
        """Reset all generations, because the worker became another node: another cluster counted them."""
        for path in self.every_tree():
            found = inspect(path)
            metadata = decode_metadata(found.metadata) if found.metadata else None
            if metadata is not None and metadata.generation:
                fresh = msgspec.structs.replace(metadata, generation=0)
                disk.write_atomic(path / METADATA_FILE, encode_metadata(fresh))

    def record(self, directory: str) -> InstallRecord:
        try:
            return msgspec.json.decode(self._record_path(directory).read_bytes(), type=InstallRecord)
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            # Other read errors are raised: a tree of unknown state must not count as synced.
            return InstallRecord(step="cleaned")

    def reach(self, directory: str, step: SwapStep) -> None:
        """Record that an install has reached a step."""
        known = self.record(directory)
        alive = {inode(place(directory)) for place in (self.path_of, self.previous_of, self.replaced_of)}
        versions = tuple(one for one in known.versions if one.inode in alive)
        attempt = known.attempt_inode if step == "swapped" else 0
        pointer = known.pointer if step == "swapped" else None
        self.write_record(
            directory, InstallRecord(step=step, attempt_inode=attempt, pointer=pointer, versions=versions)
        )

    def reach_staged(self, directory: str, version: Version, resolved: Resolved) -> None:
        """Record a complete tree, with everything needed to finish or undo the install without its request."""
        boot_id = disk.boot_id()
        if not boot_id:
            # Without a boot ID a later reboot cannot be detected, so the sync must come before the swap.
            disk.sync_files(self.staging_of(directory))
        pointer = pointer_to(resolved)
        record = InstallRecord(
            step="staged",
            attempt_inode=version.inode,
            boot_id=boot_id,
            pointer=pointer,
            pointer_before=self.pointers.known(pointer.name) if pointer is not None else None,
            versions=(*self.record(directory).versions, version),
        )
        self.write_record(directory, record)

    def write_record(self, directory: str, record: InstallRecord) -> None:
        disk.write_atomic(self._record_path(directory), msgspec.json.encode(record), mode=0o640)

    def _unsynced(self, directory: str) -> int:
        """The inode of the tree that may not be synced yet; 0 if there is none."""
        record = self.record(directory)
        return record.attempt_inode if record.step in ("staged", "undoing") else 0

    def forget_record(self, directory: str) -> None:
        self._record_path(directory).unlink(missing_ok=True)

    def records(self) -> list[str]:
        """The directories that have a record."""
        return [path.stem for path in (self.private / "state").glob("*.json")]

    def _record_path(self, directory: str) -> Path:
        return self.private / "state" / f"{directory}.json"

    def _installed(self) -> list[Path]:
        return [path for path in directories(self.backends) if path.name != PRIVATE and target_of(path.name) is None]


def _started_by(path: Path) -> Metadata | None:
    """The metadata of a tree that can be started, as far as they can be read; None if there is none."""
    found = inspect(path)
    return (decode_metadata(found.metadata or b"{}") or Metadata()) if found.has_run_file else None
