"""Pointers: directories of meta names that contain only metadata with the directory of a backend.

A pointer is written after its tree is in place, and reverted with it. A meta name that another install has changed
meanwhile is not reverted. All methods block.
"""

from __future__ import annotations

from pathlib import Path

from enginehouse.core.backend import Resolved
from enginehouse.core.errors import Conflict
from enginehouse.core.installation import (
    METADATA_FILE,
    RUN_FILE,
    InstallRecord,
    Metadata,
    check_directory,
    decode_metadata,
    encode_metadata,
    pointer_for,
)
from enginehouse.host import disk
from enginehouse.worker.backends.inspection import inspect, now


class Pointers:
    def __init__(self, backends: Path) -> None:
        self._backends = backends

    def check(self, resolved: Resolved) -> None:
        """Raise `Conflict` if the meta name is the directory of another backend."""
        if _has_pointer(resolved) and (self._path_of(resolved.meta) / RUN_FILE).exists():
            raise Conflict(
                f"cannot use {resolved.meta} as a meta name of {resolved.directory}: "
                "a backend of that name is installed; delete it first"
            )

    def known(self, name: str) -> Metadata | None:
        """The metadata of a meta name; None if it does not exist or cannot be read."""
        found = inspect(self._path_of(name))
        return decode_metadata(found.metadata) if found.metadata else None

    def point(self, resolved: Resolved) -> None:
        pointer = pointer_to(resolved)
        if pointer is not None:
            self.write(pointer)

    def write(self, metadata: Metadata) -> None:
        """Write a pointer. An unchanged one is left alone, so that it keeps the time of its first install."""
        if _is_same(self.known(metadata.name), metadata):
            return
        pointer = self._path_of(metadata.name)
        pointer.mkdir(mode=0o750, exist_ok=True)
        disk.write_atomic(pointer / METADATA_FILE, encode_metadata(metadata))

    def take_back(self, record: InstallRecord) -> None:
        """Revert the pointer of an install: restore the one before, or remove it if there was none."""
        written, before = record.pointer, record.pointer_before
        if written is None or not _is_same(self.known(written.name), written):
            return
        is_empty = not (self._path_of(written.meta_backend_for) / RUN_FILE).is_file()
        if before is None or (is_empty and before.meta_backend_for == written.meta_backend_for):
            disk.remove_tree(self._path_of(written.name))
        else:
            self.write(before)

    def _path_of(self, name: str) -> Path:
        return self._backends / check_directory(name)


def pointer_to(resolved: Resolved) -> Metadata | None:
    """The pointer of a build; None if it has no meta name of its own."""
    return pointer_for(resolved, now()) if _has_pointer(resolved) else None


def _has_pointer(resolved: Resolved) -> bool:
    return bool(resolved.meta) and resolved.meta != resolved.directory


def _is_same(known: Metadata | None, wanted: Metadata) -> bool:
    return known is not None and (known.meta_backend_for, known.version) == (wanted.meta_backend_for, wanted.version)
