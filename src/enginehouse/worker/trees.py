"""The directories of installed backends: what is there, and the few steps that change it.

The only writer of a backends directory. At every instant a backend's directory is the whole old version, the whole new
one or absent. New trees are made in `.enginehouse/staging`, replaced ones go through `replaced` to `previous`; a kill
at any step leaves a record and such trees, which `recover` finishes or undoes at the next start. Trees are told apart
by inode. Everything blocks; callers hold the lock of the directory.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from enginehouse.core.backend import InstalledBackend, Resolved
from enginehouse.core.errors import Conflict, Invalid, NotFound
from enginehouse.core.installation import (
    BACKUPS,
    HOUSE,
    METADATA_FILE,
    RUN_FILE,
    InstallRecord,
    Metadata,
    Step,
    Version,
    check_directory,
    decode_metadata,
    encode_metadata,
    listing,
    pointer_for,
    target_of,
)
from enginehouse.host import disk
from enginehouse.worker.looking import directories, inode, look, now


class Trees:
    def __init__(self, backends: Path, system: Path | None = None) -> None:
        self.backends = backends
        self._system = system

    @property
    def house(self) -> Path:
        return self.backends / HOUSE

    def path_of(self, directory: str) -> Path:
        return self.backends / check_directory(directory)

    def staging_of(self, directory: str) -> Path:
        return self.house / "staging" / check_directory(directory)

    def previous_of(self, directory: str) -> Path:
        return self.house / "previous" / check_directory(directory)

    def make_directories(self) -> None:
        self.backends.mkdir(mode=0o750, parents=True, exist_ok=True)
        for name in ("staging", "replaced", "previous", "state"):
            (self.house / name).mkdir(mode=0o750, parents=True, exist_ok=True)

    def list_installed(self) -> tuple[InstalledBackend, ...]:
        """What is there; a directory that cannot be read hides nothing but itself."""
        system = [look(path) for path in directories(self._system)] if self._system is not None else []
        return listing([look(path) for path in self._installed()], system)

    def every_tree(self) -> list[Path]:
        """All complete versions: installed ones, then previous ones."""
        return [*self._installed(), *directories(self.house / "previous")]

    def inode_of(self, directory: str) -> int | None:
        """What tells a tree from the one that replaced it under the same name."""
        return inode(self.path_of(directory))

    def metadata_of(self, directory: str) -> Metadata | None:
        """Of a backend that could be started; None where there is none."""
        found = look(self.path_of(directory))
        return decode_metadata(found.metadata) if found.metadata and found.has_run_file else None

    def previous_metadata(self, directory: str) -> Metadata | None:
        found = look(self.previous_of(directory))
        return (decode_metadata(found.metadata or b"{}") or Metadata()) if found.has_run_file else None

    def note(self, directory: str, metadata: Metadata) -> None:
        """A wish found what it wanted, and what is known of it has changed."""
        disk.write_atomic(self.path_of(directory) / METADATA_FILE, encode_metadata(metadata))

    def forget_generations(self) -> None:
        """For a worker that has become another node: what was applied was counted by another house."""
        for path in self.every_tree():
            found = look(path)
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
        found = look(self.path_of(resolved.meta))
        known = decode_metadata(found.metadata) if found.metadata else None
        if known is None or (known.meta_backend_for, known.version) != (resolved.directory, resolved.version):
            self._write_pointer(pointer_for(resolved, now()))

    def _write_pointer(self, metadata: Metadata) -> None:
        pointer = self.path_of(metadata.name)
        pointer.mkdir(mode=0o750, exist_ok=True)
        disk.write_atomic(pointer / METADATA_FILE, encode_metadata(metadata))

    def record(self, directory: str) -> InstallRecord:
        try:
            return msgspec.json.decode(self._record_path(directory).read_bytes(), type=InstallRecord)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return InstallRecord(step="cleaned")

    def reach(self, directory: str, step: Step) -> None:
        """Write down that an install has come so far."""
        known = self.record(directory)
        alive = {inode(place(directory)) for place in (self.path_of, self.previous_of, self._replaced_of)}
        versions = tuple(one for one in known.versions if one.inode in alive)
        attempt = known.attempt_inode if step == "swapped" else 0
        pointer = known.pointer if step == "swapped" else None
        self._write_record(
            directory, InstallRecord(step=step, attempt_inode=attempt, pointer=pointer, versions=versions)
        )

    def reach_staged(self, directory: str, version: Version, resolved: Resolved) -> None:
        """From here on everything is on disk: the tree, and what is needed to finish without whoever asked for it."""
        pointer = pointer_for(resolved, now()) if resolved.meta and resolved.meta != resolved.directory else None
        versions = (*self.record(directory).versions, version)
        self._write_record(
            directory,
            InstallRecord(step="staged", attempt_inode=version.inode, pointer=pointer, versions=versions),
        )

    def _write_record(self, directory: str, record: InstallRecord) -> None:
        disk.write_atomic(self._record_path(directory), msgspec.json.encode(record), mode=0o640)

    def swap_in(self, directory: str) -> None:
        """Put the finished staging tree in place. The old one stays beside until `retire`."""
        current, staging, old = self.path_of(directory), self.staging_of(directory), self._replaced_of(directory)
        disk.remove_tree(old)
        if not os.path.lexists(current):
            staging.rename(current)
        elif disk.exchange(staging, current):
            staging.rename(old)
        else:
            # Two steps, with an instant where neither is in place; `recover` puts the old one back after a kill there.
            current.rename(old)
            try:
                staging.rename(current)
            except OSError:
                old.rename(current)
                raise
        disk.sync_directory(self.backends)

    def is_in_place(self, directory: str) -> bool:
        """Whether the tree of the install under way has been swapped in."""
        attempt = self.record(directory).attempt_inode
        return attempt != 0 and attempt == self.inode_of(directory)

    def retire(self, directory: str) -> None:
        """The tree that was replaced becomes the previous version, unless it could not be started anyway."""
        old, previous = self._replaced_of(directory), self.previous_of(directory)
        if look(old).has_run_file:
            disk.remove_tree(previous)
            old.rename(previous)
            disk.sync_directory(previous.parent)
        else:
            disk.remove_tree(old)

    def roll_back(self, directory: str) -> Metadata:
        """The previous version and the current one change places; one step, so it can be done again."""
        previous, current = self.previous_of(directory), self.path_of(directory)
        metadata = self.previous_metadata(directory)
        if metadata is None:
            raise NotFound(f"cannot roll {directory} back: no previous version of it is kept", code="not_found")
        if not os.path.lexists(current):
            previous.rename(current)
        elif not disk.exchange(previous, current):
            old = self._replaced_of(directory)
            current.rename(old)
            previous.rename(current)
            old.rename(previous)
        disk.sync_directory(self.backends)
        disk.sync_directory(previous.parent)
        return metadata

    def discard(self, directory: str) -> None:
        """What an attempt leaves: finished if it got as far as the swap, else undone."""
        if not self.is_in_place(directory):
            # First, because on a full disk there is no room for the record before it.
            disk.remove_tree(self.staging_of(directory))
        self.settle(directory)

    def remove(self, directory: str) -> list[int]:
        """A backend, its previous version and the meta names that point to it; nothing there is fine.

        The inodes of the trees that were there.
        """
        installed = {backend.name: backend for backend in self.list_installed()}
        if directory in installed and installed[directory].is_system:
            raise Invalid(f"cannot delete {directory}: it belongs to the system", code="unsupported", param="backend")
        # Pointers first: a kill between the two leaves a backend without a meta name, not a name that leads nowhere.
        for backend in installed.values():
            if backend.is_meta and backend.meta_backend_for == directory:
                disk.remove_tree(self.backends / backend.name)
        target, going = self.path_of(directory), self.staging_of(directory)
        gone = [number for path in (target, self.previous_of(directory)) if (number := inode(path)) is not None]
        self.make_directories()
        disk.remove_tree(going)
        if os.path.lexists(target):
            target.rename(going)
            disk.sync_directory(self.backends)
            disk.remove_tree(going)
        disk.remove_tree(self._replaced_of(directory))
        disk.remove_tree(self.previous_of(directory))
        self._record_path(directory).unlink(missing_ok=True)
        return gone

    def recover(self) -> None:
        """Finish or undo what a killed worker left: afterwards nothing is in staging."""
        self.make_directories()
        for path in directories(self.backends):
            belongs = target_of(path.name)
            if belongs is not None and belongs[1] in BACKUPS:
                self._put_back(path, self.backends / belongs[0])
        for path in directories(self.backends):
            if target_of(path.name) is not None:
                disk.remove_tree(path)
        for path in (self.house / "state").glob("*.json"):
            self.settle(path.stem)
        for path in directories(self.house / "replaced"):
            self._put_back(path, self.path_of(path.name))
        for path in directories(self.house / "replaced"):
            self.retire(path.name)
        for path in directories(self.house / "staging"):
            disk.remove_tree(path)
        self._remove_halves()
        disk.sync_directory(self.backends)

    def settle(self, directory: str) -> None:
        """What was swapped is finished; of anything less the staging tree is left, which nobody needs."""
        record = self.record(directory)
        if self.is_in_place(directory):
            staging = self.staging_of(directory)
            if os.path.lexists(staging):  # killed between the exchange and the move: this is the tree that was replaced
                disk.remove_tree(self._replaced_of(directory))
                staging.rename(self._replaced_of(directory))
            if record.pointer is not None:
                self._write_pointer(record.pointer)
            if os.path.lexists(self._replaced_of(directory)):
                self.retire(directory)
        if record.step != "cleaned":
            self.reach(directory, "cleaned")

    def _remove_halves(self) -> None:
        """Files that were being written when a worker was killed, beside those they were to replace."""
        for path in (self.house / "state", *self._installed(), *directories(self.house / "previous")):
            for half in path.glob(".*.json.*.tmp"):
                half.unlink(missing_ok=True)

    def _put_back(self, path: Path, target: Path) -> None:
        """A replaced tree whose replacement did not get into place."""
        if look(path).has_run_file and not (target / RUN_FILE).is_file():
            disk.remove_tree(target)
            path.rename(target)

    def _replaced_of(self, directory: str) -> Path:
        return self.house / "replaced" / check_directory(directory)

    def _record_path(self, directory: str) -> Path:
        return self.house / "state" / f"{directory}.json"

    def _installed(self) -> list[Path]:
        return [path for path in directories(self.backends) if path.name != HOUSE and target_of(path.name) is None]
