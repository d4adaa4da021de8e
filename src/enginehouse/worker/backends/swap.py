"""The few steps that put a tree in place, take it back or remove it, and what finishes or undoes them after a crash.

At every instant a backend's directory is the whole old version, the whole new one or absent. A new tree is in place
before it is synced, and the old one is not given up before that. A kill or a power cut at any step leaves a record and
trees beside, which `recover` settles at the next start: what is not known to be on disk is finished only while the
machine that has it in memory was not started anew, else undone. Callers hold the lock of the directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from enginehouse.core.errors import Invalid, NotFound
from enginehouse.core.installation import BACKUPS, RUN_FILE, Metadata, target_of
from enginehouse.host import disk
from enginehouse.worker.backends.inspection import directories, inode, look
from enginehouse.worker.backends.trees import Trees

log = logging.getLogger(__name__)


class Swap:
    def __init__(self, trees: Trees) -> None:
        self._trees = trees
        self._refused: set[int] = set()  # trees that the disk refused and that are not undone yet

    def swap_in(self, directory: str) -> None:
        """Put the complete staging tree in place. The old one stays beside until `finish`."""
        current, staging, old = self._places(directory)
        disk.remove_tree(old)
        if not os.path.lexists(current):
            staging.rename(current)
        else:
            disk.change_places(staging, current, spare=old)
            staging.rename(old)
        disk.sync_directory(self._trees.backends)

    def is_in_place(self, directory: str) -> bool:
        """Whether the tree of the install under way has been swapped in."""
        attempt = self._trees.record(directory).attempt_inode
        return attempt != 0 and attempt == self._trees.inode_of(directory)

    def finish(self, directory: str) -> None:
        """See to it that the tree in place lasts, then give up the one before it.

        Where the disk refuses, the one before is back in place and the error is raised.
        """
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
            # The new version is on disk, so the install has succeeded. The record says what is left to do.
            log.warning("install.not_cleaned directory=%s error=%s", directory, error)

    def retire(self, directory: str) -> None:
        """The tree that was replaced becomes the previous version, unless it could not be started anyway."""
        old, previous = self._trees.replaced_of(directory), self._trees.previous_of(directory)
        if look(old).has_run_file:
            disk.remove_tree(previous)
            old.rename(previous)
            disk.sync_directory(previous.parent)
        else:
            disk.remove_tree(old)

    def roll_back(self, directory: str) -> Metadata:
        """The previous version and the current one change places; one step, so it can be done again."""
        self.settle(directory)
        previous, current = self._trees.previous_of(directory), self._trees.path_of(directory)
        metadata = self._trees.previous_metadata(directory)
        if metadata is None:
            raise NotFound(f"cannot roll {directory} back: no previous version of it is kept", code="not_found")
        if not os.path.lexists(current):
            previous.rename(current)
        else:
            disk.change_places(previous, current, spare=self._trees.replaced_of(directory))
        disk.sync_directory(self._trees.backends)
        disk.sync_directory(previous.parent)
        return metadata

    def discard(self, directory: str) -> None:
        """What an attempt leaves: finished if it got as far as the swap, else undone."""
        if not self.is_in_place(directory):
            # First, because on a full disk there is no room for the record before it.
            disk.remove_tree(self._trees.staging_of(directory))
        self.settle(directory)

    def remove(self, directory: str) -> list[int]:
        """A backend, its previous version and the meta names that point to it; nothing there is fine.

        The inodes of the trees that were there.
        """
        installed = {backend.name: backend for backend in self._trees.list_installed()}
        if directory in installed and installed[directory].is_system:
            raise Invalid(f"cannot delete {directory}: it belongs to the system", code="unsupported", param="backend")
        # Pointers first: a kill between the two leaves a backend without a meta name, not a name that leads nowhere.
        for backend in installed.values():
            if backend.is_meta and backend.meta_backend_for == directory:
                disk.remove_tree(self._trees.backends / backend.name)
        target, going = self._trees.path_of(directory), self._trees.staging_of(directory)
        gone = [number for path in (target, self._trees.previous_of(directory)) if (number := inode(path)) is not None]
        self._trees.make_directories()
        disk.remove_tree(going)
        if os.path.lexists(target):
            target.rename(going)
        # Before anything of it is removed. Also where nothing is left: an attempt before this one may have failed to.
        disk.sync_directory(self._trees.backends)
        disk.remove_tree(going)
        disk.remove_tree(self._trees.replaced_of(directory))
        disk.remove_tree(self._trees.previous_of(directory))
        self._trees.forget_record(directory)
        return gone

    def recover(self) -> None:
        """Finish or undo what a killed worker left: afterwards nothing is in staging but what this user may not remove.

        Such a leftover (a file of another user in it) is told and stops nothing but installs of its own name.
        """
        self._trees.make_directories()
        for path in directories(self._trees.backends):
            belongs = target_of(path.name)
            if belongs is not None and belongs[1] in BACKUPS:
                self._put_back(path, self._trees.backends / belongs[0])
        for path in directories(self._trees.backends):
            if target_of(path.name) is not None:
                _remove_left(path)
        for directory in self._trees.records():
            with _told(self._trees.staging_of(directory)):
                self.settle(directory)
        for path in directories(self._trees.private / "replaced"):
            self._put_back(path, self._trees.path_of(path.name))
        for path in directories(self._trees.private / "replaced"):
            with _told(path):
                self.retire(path.name)
        for path in directories(self._trees.private / "staging"):
            _remove_left(path)
        self._remove_halves()
        disk.sync_directory(self._trees.backends)

    def settle(self, directory: str) -> None:
        """Finish an install that was left, where that is safe, else undo it.

        A disk that refuses is no error as long as the old version is back.
        """
        record = self._trees.record(directory)
        if record.step == "cleaned":
            return
        has_stopped = record.boot_id not in ("", disk.boot_id())
        is_refused = record.step == "undoing" or record.attempt_inode in self._refused
        if not self.is_in_place(directory) or is_refused or has_stopped:
            if has_stopped:
                log.warning("install.undone directory=%s: the machine stopped before it was on disk", directory)
            self.undo(directory)
            return
        try:
            self.finish(directory)
        except OSError as error:
            if self._trees.record(directory).step != "cleaned":
                raise
            log.warning("install.undone directory=%s error=%s", directory, error)

    def undo(self, directory: str) -> None:
        """Back to what was before the swap. What is back already is fine."""
        record = self._trees.record(directory)
        # Where even that cannot be written down, this process at least does not believe the next sync.
        self._refused.add(record.attempt_inode)
        current, staging, old = self._places(directory)
        if self.is_in_place(directory):
            # A sync tells of lost bytes once: whoever comes after a kill here must not ask again and believe it.
            # A full disk has no room for the note, and the steps below make some.
            with contextlib.suppress(OSError):
                self._trees.write_record(directory, msgspec.structs.replace(record, step="undoing"))
            self._set_aside(directory)
            if record.pointer_before is None:
                self._trees.pointers.take_back(record)  # first: a name that leads nowhere is worse than none
            if os.path.lexists(old):
                disk.change_places(old, current, spare=staging)
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
        """After a kill between exchange and move, the tree in staging is the one that was replaced."""
        _, staging, old = self._places(directory)
        if os.path.lexists(staging):
            disk.remove_tree(old)
            staging.rename(old)

    def _places(self, directory: str) -> tuple[Path, Path, Path]:
        """Where the current tree is, where the new one is made, and where the old one waits."""
        trees = self._trees
        return trees.path_of(directory), trees.staging_of(directory), trees.replaced_of(directory)

    def _remove_halves(self) -> None:
        """Files that were being written when a worker was killed, beside those they were to replace."""
        for path in (self._trees.private / "state", *self._trees.every_tree()):
            for half in path.glob(".*.json.*.tmp"):
                half.unlink(missing_ok=True)

    def _put_back(self, path: Path, target: Path) -> None:
        """A replaced tree whose replacement did not get into place."""
        if look(path).has_run_file and not (target / RUN_FILE).is_file():
            disk.remove_tree(target)
            path.rename(target)


def _remove_left(path: Path) -> None:
    with _told(path):
        disk.remove_tree(path)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        log.warning("install.not_removed path=%s: %s in it: %s", path, error.filename or "something", error.strerror)
