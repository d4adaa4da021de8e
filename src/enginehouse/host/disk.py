"""Files: atomic writes, sync, checksums, locks.

All functions block, so callers on the event loop use a thread. A file under its final name is always complete: the
content is written to a temporary file, synced and renamed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from enginehouse.core.errors import Conflict, EnginehouseError, Hopeless, Unavailable

_CHUNK_BYTES = 1024 * 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_FICLONE = 0x40049409
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def storage_error(error: OSError, doing: str) -> EnginehouseError:
    """Translate the error of a failed write. All are temporary: a full disk can be freed, other faults can pass."""
    if error.errno in _FULL:
        return Unavailable(
            f"cannot {doing}: no space left on the disk; free some space, it is retried automatically",
            code="insufficient_disk",
        )
    return Unavailable(f"cannot {doing}: {error.strerror or error}", code="resource_exhausted")


def write_atomic(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace the content of `path` atomically: a crash leaves the old or the new content."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(Path(temporary).unlink, missing_ok=True)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
        on_failure.pop_all()
    sync_directory(path.parent)


def boot_id() -> str:
    """The ID of the current boot of this machine; empty if the system does not report one."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(root: Path) -> None:
    """Sync every file and directory below `root`, so that a later rename cannot expose incomplete files."""
    try:
        _sync_each(root)
    except PermissionError:
        os.sync()  # an image may have files that their owner cannot read, so everything is synced


def _sync_each(root: Path) -> None:
    def refuse(error: OSError) -> None:
        raise error

    for directory, _, files in os.walk(root, onerror=refuse):
        for name in files:
            path = os.path.join(directory, name)
            if os.path.islink(path):
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(Path(directory))


def sync_files(root: Path) -> None:
    """Like `sync_tree`, for many thousands of files: one call for the whole file system where that is supported."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None) if sys.platform == "linux" else None
    if call is None:
        sync_tree(root)
        return
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if call(descriptor) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(root))
    finally:
        os.close(descriptor)


def exchange(first: Path, second: Path) -> bool:
    """Swap two directories atomically, so that both always exist. False if the system does not support it."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


def exchange_paths(first: Path, second: Path, spare: Path) -> None:
    """Swap two directories, atomically if the system can; a crash may else leave `second` at `spare`."""
    if exchange(first, second):
        return
    second.rename(spare)
    try:
        first.rename(second)
    except OSError:
        spare.rename(second)
        raise
    spare.rename(first)


def remove_tree(path: Path) -> None:
    """Remove a file, a link or a whole directory, if it exists; also directories without permissions."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(path)
    except PermissionError:
        _make_accessible(path.name, os.open(path.parent, _DIRECTORY))
        shutil.rmtree(path)


def _make_accessible(name: str, above: int) -> None:
    """Give the owner all rights on a directory and those below it, without following links. Closes `above`."""
    try:
        _allow_owner(name, above)
        handle = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    finally:
        os.close(above)
    try:
        with os.scandir(handle) as found:
            inside = [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]
        for inner in inside:
            _make_accessible(inner, os.dup(handle))
    finally:
        os.close(handle)


def _allow_owner(name: str, above: int) -> None:
    if sys.platform != "linux":
        os.chmod(name, 0o700, dir_fd=above, follow_symlinks=False)
        return
    # O_PATH needs no permission, and chmod by descriptor changes this directory even if its name was replaced.
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=above)
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)
    finally:
        os.close(handle)


def sha256_of(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Return the hex digest of a file. `progress` is called with the bytes read so far."""
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done)
    return digest.hexdigest()


def make_usable(data: Path) -> None:
    """Create a data directory if needed, and check that it is writable. Raises `Hopeless` otherwise."""
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = data / f".probe-{os.getpid()}"
        probe.touch(mode=0o600)
        probe.unlink()
    except OSError as error:
        raise Hopeless(
            f"cannot use {data} as data directory: {error.strerror or error}; make it writable or choose another --data"
        ) from error


@contextlib.contextmanager
def naming_the_file(place: Path, option: str = "--data") -> Iterator[None]:
    """Translate `OSError` into `Hopeless` that names the file in `place`, the directory set with `option`."""
    try:
        yield
    except OSError as error:
        prefix = f"cannot use {place} as {'data' if option == '--data' else 'backends'} directory: "
        if error.errno in _FULL:
            raise Hopeless(f"{prefix}no space left on the disk; free some space or choose another {option}") from error
        name = Path(error.filename).name if isinstance(error.filename, str) else "a file"
        if error.filename == str(place):
            raise Hopeless(f"{prefix}{error.strerror}; make it writable or choose another {option}") from error
        raise Hopeless(
            f"{prefix}{name} in it: {error.strerror or error}; move it away or choose another {option}"
        ) from error


def share_file(source: Path, target: Path, *, may_link: bool) -> bool:
    """Make `target` a clone of `source`, or a hard link if `may_link`; False if neither is possible."""
    if sys.platform == "linux":
        with source.open("rb") as reader, target.open("xb") as writer:
            try:
                fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
                return True
            except OSError:
                target.unlink()
    if may_link:
        with contextlib.suppress(OSError):  # too many links, or a file system without links
            os.link(source, target, follow_symlinks=False)
            return True
    return False


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def is_locked(path: Path) -> bool:
    """Whether a running program holds the lock in this file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


class Lock:
    """An exclusive lock on a file. It ends with its process and contains the process ID of its holder."""

    def __init__(self, path: Path, doing: str, option: str = "--data", place: Path | None = None) -> None:
        """Raise `Conflict` with the process ID of the holder if another process has the lock.

        `place` is the locked directory, if it is not the directory of the file.
        """
        with naming_the_file(place or path.parent, option):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(self._descriptor, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(self._descriptor)
            raise Conflict(
                f"cannot {doing}: {place or path.parent} is in use by process {holder}; "
                f"stop it or choose another {option}"
            ) from None
        # Only for the message of `Conflict`: the lock is valid even if the disk is full.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock. The file stays: after a removal, two processes could lock two files of the same name."""
        os.close(self._descriptor)
