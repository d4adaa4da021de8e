"""Files of this machine: written whole or not at all, synced, hashed, locked.

Everything here blocks, so callers on the event loop go through a thread. What a reader can see under a final name is
always complete: contents are written beside, synced and renamed.
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
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def storage_error(error: OSError, doing: str) -> EnginehouseError:
    """What a failed write means to whoever asked for it; a full disk and a passing fault may heal."""
    if error.errno in _FULL:
        return Unavailable(
            f"cannot {doing}: no space left on the disk; free some, it goes on by itself", code="insufficient_disk"
        )
    return Unavailable(f"cannot {doing}: {error.strerror or error}", code="resource_exhausted")


def write_atomic(path: Path, content: bytes, mode: int = 0o644) -> None:
    """`path` has its old content or the new one, after a crash at any instruction too."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    with contextlib.ExitStack() as unless_in_place:
        unless_in_place.callback(Path(temporary).unlink, missing_ok=True)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
        unless_in_place.pop_all()
    sync_directory(path.parent)


def boot_id() -> str:
    """What tells this run of the machine from any other; empty where the system does not say."""
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
    """Every file and directory below `root`: after this, a rename of `root` cannot reveal holes."""
    try:
        _sync_each(root)
    except PermissionError:
        os.sync()  # an image may have what its owner may not read: it is synced with everything else


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
    """Like `sync_tree` for trees of many thousands of files: one call for their whole file system where there is one.

    Asking for each file by itself takes longer than writing them did.
    """
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
    """Swap two directories in one step, so that no instant shows neither. False where the system cannot do that."""
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


def change_places(first: Path, second: Path, spare: Path) -> None:
    """In one step where the system can.

    Else there is an instant without `second`: whoever finds the tree that was there at `spare` must put it back.
    """
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
    """A file, a link or a whole directory; nothing there is fine. Directories that may not be entered, listed or
    written are removed too: an image may have made them so."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(path)
    except PermissionError:
        _open_up(path.name, os.open(path.parent, _DIRECTORY))
        shutil.rmtree(path)


def _open_up(name: str, above: int) -> None:
    """Let us list and change a directory and all below it, none of which is reached by a link. Closes `above`."""
    try:
        _let_us_in(name, above)
        handle = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    finally:
        os.close(above)
    try:
        with os.scandir(handle) as found:
            inside = [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]
        for inner in inside:
            _open_up(inner, os.dup(handle))
    finally:
        os.close(handle)


def _let_us_in(name: str, above: int) -> None:
    if sys.platform != "linux":
        os.chmod(name, 0o700, dir_fd=above, follow_symlinks=False)
        return
    # A handle that needs no permission, and a way to change what it stands for, whatever has the name by then.
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=above)
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)
    finally:
        os.close(handle)


def sha256_of(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Hex digest; `progress` hears the bytes read so far."""
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
    """See to it that a data directory is there and can be written; one sentence where it cannot."""
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = data / f".probe-{os.getpid()}"
        probe.touch(mode=0o600)
        probe.unlink()
    except OSError as error:
        raise Hopeless(
            f"cannot use {data} as data directory: {error.strerror or error}; make it writable or give another --data"
        ) from error


@contextlib.contextmanager
def naming_the_culprit(place: Path, option: str = "--data") -> Iterator[None]:
    """Where something inside the directory that `option` names is not what it must be, one sentence says what."""
    try:
        yield
    except OSError as error:
        told = f"cannot use {place} as {'data' if option == '--data' else 'backends'} directory: "
        if error.errno in _FULL:
            raise Hopeless(f"{told}no space left on the disk; free some or give another {option}") from error
        name = Path(error.filename).name if isinstance(error.filename, str) else "something"
        if error.filename == str(place):
            raise Hopeless(f"{told}{error.strerror}; make it writable or give another {option}") from error
        raise Hopeless(
            f"{told}{name} in it: {error.strerror or error}; move that away or give another {option}"
        ) from error


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


class Lock:
    """An exclusive lock on a file that dies with its holder and says who holds it."""

    def __init__(self, path: Path, doing: str, option: str = "--data", place: Path | None = None) -> None:
        """Raises `Conflict` naming the holder's pid when another process has it.

        `place` is what is locked, where that is not the directory of the file.
        """
        with naming_the_culprit(place or path.parent, option):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(self._descriptor, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(self._descriptor)
            raise Conflict(
                f"cannot {doing}: {place or path.parent} is in use by process {holder}; "
                f"stop it or give another {option}"
            ) from None
        # A courtesy to whoever is refused; a full disk does not make the lock any weaker.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """The file stays: removing it would let two holders lock two files of one name."""
        os.close(self._descriptor)
