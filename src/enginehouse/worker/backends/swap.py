"""Swaps a tree in, rolls it back or removes it, and recovers from a crash at any step.

Invariant: a backend's directory is the complete old version, the complete new one, or absent. A new tree is swapped in
before it is synced, and the old one is kept until after the sync. A kill or power failure at any step leaves a record
and trees, from which `recover` finishes or undoes the install at the next start. A tree that was not synced is finished
only if the machine has not rebooted since; otherwise it is undone, because its data may be lost.
Callers hold the lock of the directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from enginehouse.core.errors import NotFound
from enginehouse.core.installation import BACKUPS, METADATA_FILE, RUN_FILE, Metadata, encode_metadata, target_of
from enginehouse.host import disk
from enginehouse.worker.backends.inspection import check_removable, directories, inode, inspect
from enginehouse.worker.backends.trees import Trees

log = logging.getLogger(__name__)


class Swap:
    def __init__(self, trees: Trees) -> None:
        self._trees = trees
        self._refused: set[int] = set()  # trees whose sync failed and that are not undone yet

    def swap_in(self, directory: str) -> None:
        """Swap the complete staging tree in. The old tree is kept until `finish`."""
        current, staging, old = self._paths(directory)
        disk.remove_tree(old)
        if not os.path.lexists(current):
            staging.rename(current)
        else:
            disk.exchange_paths(staging, current, spare=old)
            staging.rename(old)
        disk.sync_directory(self._trees.backends)

    def is_in_place(self, directory: str) -> bool:
        """Whether the tree of the current install has been swapped in."""
        attempt = self._trees.record(directory).attempt_inode
        return attempt != 0 and attempt == self._trees.inode_of(directory)

    def finish(self, directory: str) -> None:
        """Sync the tree in place, then retire the old one; if the sync fails, swap the old one back and raise."""
        record = self._trees.record(directory)
        self._set_aside(directory)
        if record.step != "swapped":
            try:
                if record.pointer is not None:
                    self._trees.pointers.write(record.pointer)
                if record.boot_id:
                    disk.sync_files(self._trees.path_of(directory))
                self._trees.reach(directory, "swapped")
            except OSError:
                self.undo(directory)
                raise
        try:
            self.retire(directory)
            self._trees.reach(directory, "cleaned")
        except OSError as error:
            # The new version is synced, so the install has succeeded. The record keeps the remaining step.
            log.warning("install.not_cleaned directory=%s error=%s", directory, error)

    def retire(self, directory: str) -> None:
        """Make the replaced tree the previous version; one that cannot be started is removed."""
        old, previous = self._trees.replaced_of(directory), self._trees.previous_of(directory)
        if inspect(old).has_run_file:
            disk.remove_tree(previous)
            old.rename(previous)
            disk.sync_directory(previous.parent)
        else:
            disk.remove_tree(old)

    def roll_back(self, directory: str) -> Metadata:
        """Exchange the previous version with the current one, in one step. A second call undoes the first."""
        self.settle(directory)
        previous, current = self._trees.previous_of(directory), self._trees.path_of(directory)
        metadata = self._trees.previous_metadata(directory)
        if metadata is None:
            raise NotFound(f"cannot roll back {directory}: it has no previous version", code="not_found")
        if not os.path.lexists(current):
            previous.rename(current)
        else:
            disk.exchange_paths(previous, current, spare=self._trees.replaced_of(directory))
        disk.sync_directory(self._trees.backends)
        disk.sync_directory(previous.parent)
        return metadata

    def return_to(self, directory: str, metadata: Metadata) -> None:
        """Exchange the previous version with the current one, with these metadata. They are written first: a kill
        before the exchange leaves them in a tree that is not in use.
        """
        disk.write_atomic(self._trees.previous_of(directory) / METADATA_FILE, encode_metadata(metadata))
        self.roll_back(directory)

    def discard(self, directory: str) -> None:
        """Clean up after an attempt: finish it if the tree was swapped in, otherwise undo it."""
        if not self.is_in_place(directory):
            # First, because a full disk has no space for the record before the tree is removed.
            disk.remove_tree(self._trees.staging_of(directory))
        self.settle(directory)

    def remove(self, directory: str) -> list[int]:
        """Remove a backend, its previous version and its meta names; the inodes of the trees. Idempotent."""
        installed = self._trees.list_installed()
        check_removable(installed, directory)
        # Pointers first: a kill in between leaves a backend without a meta name instead of a dangling meta name.
        for backend in installed:
            if backend.is_meta and backend.meta_backend_for == directory:
                disk.remove_tree(self._trees.backends / backend.name)
        target, going = self._trees.path_of(directory), self._trees.staging_of(directory)
        gone = [number for path in (target, self._trees.previous_of(directory)) if (number := inode(path)) is not None]
        self._trees.make_directories()
        disk.remove_tree(going)
        if os.path.lexists(target):
            target.rename(going)
        # Before any file is removed. Also if the tree is already gone: an earlier attempt may have failed to sync.
        disk.sync_directory(self._trees.backends)
        disk.remove_tree(going)
        disk.remove_tree(self._trees.replaced_of(directory))
        disk.remove_tree(self._trees.previous_of(directory))
        self._trees.forget_record(directory)
        return gone

    def recover(self) -> None:
        """Finish or undo the interrupted work of a killed worker, and empty the staging directory.

        A leftover that this user may not remove is logged. It blocks only installs of the same name.
        """
        self._trees.make_directories()
        for path in directories(self._trees.backends):
            belongs = target_of(path.name)
            if belongs is not None and belongs[1] in BACKUPS:
                self._put_back(path, self._trees.backends / belongs[0])
        for path in directories(self._trees.backends):
            if target_of(path.name) is not None:
                _remove_leftover(path)
        for directory in self._trees.records():
            with _logging_refusals(self._trees.staging_of(directory)):
                self.settle(directory)
        for path in directories(self._trees.private / "replaced"):
            self._put_back(path, self._trees.path_of(path.name))
        for path in directories(self._trees.private / "replaced"):
            with _logging_refusals(path):
                self.retire(path.name)
        for path in directories(self._trees.private / "staging"):
            _remove_leftover(path)
        self._remove_partial_files()
        disk.sync_directory(self._trees.backends)

    def settle(self, directory: str) -> None:
        """Finish an interrupted install if that is safe, else undo it; a failed sync may restore the old version."""
        record = self._trees.record(directory)
        if record.step == "cleaned":
            return
        has_stopped = record.boot_id not in ("", disk.boot_id())
        is_refused = record.step == "undoing" or record.attempt_inode in self._refused
        if not self.is_in_place(directory) or is_refused or has_stopped:
            if has_stopped:
                log.warning("install.undone directory=%s reason=%r", directory, "the machine rebooted before the sync")
            self.undo(directory)
            return
        try:
            self.finish(directory)
        except OSError as error:
            if self._trees.record(directory).step != "cleaned":
                raise
            log.warning("install.undone directory=%s error=%s", directory, error)

    def undo(self, directory: str) -> None:
        """Restore the state before the swap. Idempotent."""
        record = self._trees.record(directory)
        # In memory as well, in case the record cannot be written: the next sync must not be trusted.
        self._refused.add(record.attempt_inode)
        current, staging, old = self._paths(directory)
        if self.is_in_place(directory):
            # A sync reports lost data only once, so after a kill here a second sync must not be trusted.
            # A full disk may have no space for the record; the steps below free some.
            with contextlib.suppress(OSError):
                self._trees.write_record(directory, msgspec.structs.replace(record, step="undoing"))
            self._set_aside(directory)
            if record.pointer_before is None:
                self._trees.pointers.take_back(record)  # first: a dangling meta name is worse than none
            if os.path.lexists(old):
                disk.exchange_paths(old, current, spare=staging)
            else:
                current.rename(staging)
            disk.sync_directory(self._trees.backends)
        elif inode(old) != record.attempt_inode and not os.path.lexists(current):
            self._put_back(old, current)
        disk.remove_tree(staging)
        if inode(old) == record.attempt_inode:
            disk.remove_tree(old)
        self._trees.pointers.take_back(record)
        self._trees.reach(directory, "cleaned")
        self._refused.discard(record.attempt_inode)

    def _set_aside(self, directory: str) -> None:
        """Move the replaced tree out of staging, where a kill between exchange and move leaves it."""
        _, staging, old = self._paths(directory)
        if os.path.lexists(staging):
            disk.remove_tree(old)
            staging.rename(old)

    def _paths(self, directory: str) -> tuple[Path, Path, Path]:
        """The paths of the current tree, the staging tree and the replaced tree."""
        trees = self._trees
        return trees.path_of(directory), trees.staging_of(directory), trees.replaced_of(directory)

    def _remove_partial_files(self) -> None:
        """Remove the temporary files of writes that a kill interrupted."""
        for path in (self._trees.private / "state", *self._trees.every_tree()):
            for partial in path.glob(".*.json.*.tmp"):
                partial.unlink(missing_ok=True)

    def _put_back(self, path: Path, target: Path) -> None:
        """Restore a replaced tree if its replacement is not in place."""
        if inspect(path).has_run_file and not (target / RUN_FILE).is_file():
            disk.remove_tree(target)
            path.rename(target)


def _remove_leftover(path: Path) -> None:
    with _logging_refusals(path):
        disk.remove_tree(path)


@contextlib.contextmanager
def _logging_refusals(path: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        log.warning("install.not_removed path=%s file=%s error=%s", path, error.filename or "unknown", error.strerror)
