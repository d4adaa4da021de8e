"""The directories of installed backends: what is there, and the few steps that change it.

The only writer of a backends directory. At every instant a backend's directory is the whole old version, the whole new
one or absent. New trees are made in `.enginehouse/staging`, replaced ones go through `replaced` to `previous`; a kill
at any step leaves a record and such trees, which `recover` finishes or undoes at the next start. Trees are told apart
by inode. Everything blocks; callers hold the lock of the directory.
"""

from __future__ import annotations

import contextlib
from datetime import datetime
from pathlib import Path

import msgspec

from enginehouse.core.backend import InstalledBackend, Resolved
from enginehouse.core.errors import Conflict, Invalid, NotFound
from enginehouse.core.installation import (
    BACKUPS,
    HOUSE,
    METADATA_FILE,
    RUN_FILE,
    Found,
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
        system = [look(path) for path in _directories(self._system)] if self._system is not None else []
        return listing([look(path) for path in self._installed()], system)

    def every_tree(self) -> list[Path]:
        """All complete versions: installed ones, then previous ones."""
        return [*self._installed(), *_directories(self.house / "previous")]

    def inode_of(self, directory: str) -> int | None:
        """What tells a tree from the one that replaced it under the same name."""
        return _inode(self.path_of(directory))

    def metadata_of(self, directory: str) -> Metadata | None:
        """Of a backend that could be started; None where there is none."""
        found = look(self.path_of(directory))
        return decode_metadata(found.metadata) if found.metadata and found.has_run_file else None

    def previous_metadata(self, directory: str) -> Metadata | None:
        found = look(self.previous_of(directory))
        return (decode_metadata(found.metadata or b"{}") or Metadata()) if found.has_run_file else None

    def note(self, directory: str, generation: int) -> None:
        """A wish of this generation found what it wanted."""
        path = self.path_of(directory) / METADATA_FILE
        metadata = decode_metadata(path.read_bytes())
        if metadata is not None and metadata.generation < generation:
            disk.write_atomic(path, encode_metadata(msgspec.structs.replace(metadata, generation=generation)))

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
        alive = {_inode(path) for path in (self.path_of(directory), self.previous_of(directory))}
        if step == "swapped":
            alive.add(_inode(self._replaced_of(directory)))
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
        if not current.exists():
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
        if not current.exists():
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
        """What an attempt leaves that did not get as far as the swap."""
        disk.remove_tree(self.staging_of(directory))
        with contextlib.suppress(FileNotFoundError):
            if self.record(directory).step not in ("swapped", "cleaned"):
                self.reach(directory, "cleaned")

    def remove(self, directory: str) -> None:
        """A backend, its previous version and the meta names that point to it; nothing there is fine."""
        installed = {backend.name: backend for backend in self.list_installed()}
        if directory in installed and installed[directory].is_system:
            raise Invalid(f"cannot delete {directory}: it belongs to the system", code="unsupported", param="backend")
        # Pointers first: a kill between the two leaves a backend without a meta name, not a name that leads nowhere.
        for backend in installed.values():
            if backend.is_meta and backend.meta_backend_for == directory:
                disk.remove_tree(self.backends / backend.name)
        target, going = self.path_of(directory), self.staging_of(directory)
        self.make_directories()
        disk.remove_tree(going)
        if target.exists():
            target.rename(going)
            disk.sync_directory(self.backends)
            disk.remove_tree(going)
        disk.remove_tree(self._replaced_of(directory))
        disk.remove_tree(self.previous_of(directory))
        self._record_path(directory).unlink(missing_ok=True)

    def recover(self) -> None:
        """Finish or undo what a killed worker left: afterwards nothing is in staging."""
        self.make_directories()
        for path in _directories(self.backends):
            belongs = target_of(path.name)
            if belongs is not None and belongs[1] in BACKUPS:
                self._put_back(path, self.backends / belongs[0])
        for path in _directories(self.backends):
            if target_of(path.name) is not None:
                disk.remove_tree(path)
        for path in (self.house / "state").glob("*.json"):
            self._finish(path.stem)
        for path in _directories(self.house / "replaced"):
            self._put_back(path, self.path_of(path.name))
        for path in _directories(self.house / "replaced"):
            self.retire(path.name)
        for path in _directories(self.house / "staging"):
            disk.remove_tree(path)
        disk.sync_directory(self.backends)

    def _finish(self, directory: str) -> None:
        """What was swapped is finished; of anything less the staging tree is left, which is removed."""
        record = self.record(directory)
        if record.attempt_inode and self.inode_of(directory) == record.attempt_inode:
            staging = self.staging_of(directory)
            if staging.exists():  # killed between the exchange and the move: this is the tree that was replaced
                disk.remove_tree(self._replaced_of(directory))
                staging.rename(self._replaced_of(directory))
            if record.pointer is not None:
                self._write_pointer(record.pointer)
            if self._replaced_of(directory).exists():
                self.retire(directory)
        if record.step != "cleaned":
            self.reach(directory, "cleaned")

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
        return [path for path in _directories(self.backends) if path.name != HOUSE and target_of(path.name) is None]


def now() -> str:
    """RFC 3339, as LocalAI's metadata has it. For people: nothing is decided by it."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def look(path: Path) -> Found:
    metadata: bytes | None
    try:
        metadata = (path / METADATA_FILE).read_bytes()
    except FileNotFoundError:
        metadata = None
    except OSError:
        metadata = b""
    try:
        status = (path / RUN_FILE).stat()
        has_run_file = (path / RUN_FILE).is_file() and status.st_size > 0 and status.st_mode & 0o111 != 0
    except OSError:
        has_run_file = False
    return Found(name=path.name, metadata=metadata, has_run_file=has_run_file)


def _inode(path: Path) -> int | None:
    try:
        return path.stat(follow_symlinks=False).st_ino
    except OSError:
        return None


def _directories(path: Path) -> list[Path]:
    try:
        return [one for one in sorted(path.iterdir()) if one.is_dir() and not one.is_symlink()]
    except FileNotFoundError:
        return []
