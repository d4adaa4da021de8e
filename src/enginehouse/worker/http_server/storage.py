"""Files that LocalAI's frontends place on this worker: keys become paths, sidecars say how complete a file is.

Nothing outside the three roots is ever read or written: a key is refused if one of its parts is `..` or hidden, and its
path is resolved, links included, before it is used. A file under its name is whole, unless the sidecar
`<file>.sha256.target` says which file it will become. All functions block.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from enginehouse.core.errors import Invalid, NotFound
from enginehouse.core.name import shown
from enginehouse.host import disk
from enginehouse.worker.models.files import MANIFEST

DIGEST = ".sha256"
TARGET = ".sha256.target"
MAX_KEY = 2048
MAX_LISTED = 100_000
STAGING_SECONDS = 24 * 3600.0  # inputs and outputs of requests; nobody comes back for them after that
# Readable by engines of another user; the roots themselves are closed to all others.
_FILE_MODE, _DIRECTORY_MODE, _OUTPUT_MODE = 0o644, 0o755, 0o666


class Roots(Struct, frozen=True, kw_only=True):
    models: Path
    data: Path
    staging: Path

    def of(self, key: str) -> tuple[Path, str]:
        """The root of a key, and the rest of the key."""
        first, _, rest = key.partition("/")
        if first == "models":
            return self.models, rest
        if first == "data":
            return self.data, rest
        return self.staging, key


class FileState(Struct, frozen=True, kw_only=True):
    size_bytes: int
    sha256: str = ""  # of the whole file
    target: str = ""  # of the file that it will be, while it is not whole


def path_of(roots: Roots, key: str) -> Path:
    """The path of a key. Raises `Invalid` for one that leads out of its root or to the worker's own files."""
    root, rest = roots.of(key)
    parts = rest.split("/")
    if not rest or len(key) > MAX_KEY or "\x00" in rest:
        raise Invalid("cannot use an empty or overlong key", code="invalid_name")
    if any(part in ("", ".", "..") or part.startswith(".") or len(part.encode()) > 255 for part in parts):
        raise Invalid(f"cannot use the key {shown(key)}: a part of it is empty, hidden or '..'", code="invalid_name")
    if root == roots.models and parts[-1] == MANIFEST and len(parts) == 2:
        raise Invalid(f"cannot use the key {shown(key)}: the worker uses this file itself", code="invalid_name")
    path = root.joinpath(*parts)
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise Invalid(f"cannot use the key {shown(key)}: it leads out of its directory", code="invalid_name")
    return path


def state_of(path: Path) -> FileState:
    """What is there of a file. Hashes it if no valid sidecar knows its digest. Raises `NotFound`, or `Invalid` for a
    directory.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"cannot find {path.name}") from None
    if not path.is_file():
        raise Invalid(f"cannot use {path.name}: it is a directory", code="invalid_name")
    target = read_sidecar(path, TARGET)
    if target:
        return FileState(size_bytes=status.st_size, target=target)
    known = read_sidecar(path, DIGEST)
    if known and _sidecar(path, DIGEST).stat().st_mtime_ns >= status.st_mtime_ns:
        return FileState(size_bytes=status.st_size, sha256=known)
    digest = disk.sha256_of(path)
    write_sidecar(path, DIGEST, digest)
    return FileState(size_bytes=status.st_size, sha256=digest)


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def forget(path: Path) -> None:
    """Remove a file and what is known of it."""
    for one in (path, _sidecar(path, DIGEST), _sidecar(path, TARGET)):
        one.unlink(missing_ok=True)


def make_parents(roots: Roots, key: str, path: Path) -> None:
    root, _ = roots.of(key)
    missing = [one for one in path.parents if one.is_relative_to(root) and not one.exists()]
    for one in reversed(missing):
        with contextlib.suppress(FileExistsError):
            one.mkdir()
            one.chmod(_DIRECTORY_MODE)


def read_sidecar(path: Path, kind: str) -> str:
    try:
        text = _sidecar(path, kind).read_text("ascii", "replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return text if len(text) == 64 else ""


def write_sidecar(path: Path, kind: str, digest: str) -> None:
    disk.write_atomic(_sidecar(path, kind), digest.encode())


def remove_sidecar(path: Path, kind: str) -> None:
    _sidecar(path, kind).unlink(missing_ok=True)


def _sidecar(path: Path, kind: str) -> Path:
    return path.with_name(path.name + kind)


class Incoming:
    """The bytes of one upload on their way to the disk: appended to a partial file, or written beside the old one."""

    def __init__(self, path: Path, *, is_appended: bool) -> None:
        self._path = path
        self._is_appended = is_appended
        self._digest = hashlib.sha256()
        if is_appended:
            self._place = path
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(path, flags, _FILE_MODE)
        else:
            self._file, temporary = tempfile.mkstemp(prefix=".upload-", dir=path.parent)
            os.fchmod(self._file, _FILE_MODE)
            self._place = Path(temporary)

    def write(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            view = view[os.write(self._file, view) :]
        if not self._is_appended:
            self._digest.update(content)

    def close(self, *, is_kept: bool) -> None:
        os.fsync(self._file)
        os.close(self._file)
        if not self._is_appended and not is_kept:
            self._place.unlink(missing_ok=True)

    def digest(self) -> str:
        """The digest of the whole file, after the last byte."""
        return disk.sha256_of(self._path) if self._is_appended else self._digest.hexdigest()

    def place(self, digest: str) -> None:
        """Make the file the one under its name, with its digest beside it."""
        if not self._is_appended:
            remove_sidecar(self._path, TARGET)
            os.replace(self._place, self._path)
        write_sidecar(self._path, DIGEST, digest)
        remove_sidecar(self._path, TARGET)
        disk.sync_directory(self._path.parent)


def make_output(roots: Roots) -> Path:
    """An empty file for the output of an engine."""
    descriptor, path = tempfile.mkstemp(prefix="localai-output-", suffix=".tmp", dir=roots.staging)
    os.fchmod(descriptor, _OUTPUT_MODE)
    os.close(descriptor)
    return Path(path)


def listed(path: Path) -> list[str]:
    """The files below a directory, as relative paths. Raises `NotFound`."""
    if not path.is_dir():
        raise NotFound("cannot find the directory")
    return sorted(_walked(path))


def _walked(path: Path) -> Iterator[str]:
    count = 0
    for directory, names, files in os.walk(path):
        names[:] = [name for name in names if not name.startswith(".")]
        for name in files:
            if not name.startswith("."):
                count += 1
                yield os.path.relpath(os.path.join(directory, name), path)
        if count > MAX_LISTED:
            return


def sweep_staging(roots: Roots) -> None:
    """Remove what requests left in the staging directory a day ago."""
    oldest = time.time() - STAGING_SECONDS
    for directory, names, files in os.walk(roots.staging, topdown=False):
        for name in files:
            path = Path(directory, name)
            with contextlib.suppress(OSError):
                if path.lstat().st_mtime < oldest:
                    path.unlink()
        for name in names:
            with contextlib.suppress(OSError):  # not empty, or new
                place = Path(directory, name)
                if place.stat().st_mtime < oldest:
                    place.rmdir()
