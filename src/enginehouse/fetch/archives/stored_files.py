"""The places of an image's files: in a directory, or inside a tar that is not unpacked.

Only regular files are listed, by their name inside the source. Links are followed only within a tar and only one
step, because `docker save` writes a link for a layer that occurs twice.
"""

from __future__ import annotations

import posixpath
import tarfile
from pathlib import Path

from msgspec import Struct

from enginehouse.core.errors import Hopeless, NotFound

MAX_MEMBERS = 100_000


class StoredFile(Struct, frozen=True):
    path: Path
    offset_bytes: int
    size_bytes: int


StoredFiles = dict[str, StoredFile]


def open_places(path: Path) -> StoredFiles:
    """List the files of the layout directory or tar at `path`, by name."""
    try:
        if path.is_dir():
            return _of_directory(path)
        with tarfile.open(path, "r:") as archive:
            return _of_tar(path, archive)
    except FileNotFoundError as error:
        raise NotFound(f"cannot find {path}: no such file or directory on this machine", code="not_found") from error
    except tarfile.TarError as error:
        raise Hopeless(
            f"cannot use {path}: it is not an uncompressed tar; decompress it first",
            code="unsupported",
        ) from error
    except OSError as error:
        raise Hopeless(f"cannot read {path}: {error.strerror}", code="not_found") from error


def _of_directory(path: Path) -> StoredFiles:
    found: StoredFiles = {}
    for pattern in ("index.json", "manifest.json", "oci-layout", "blobs/sha256/*"):
        for file in path.glob(pattern):
            if file.is_file():
                found[file.relative_to(path).as_posix()] = StoredFile(file, 0, file.stat().st_size)
            if len(found) > MAX_MEMBERS:
                raise _too_many(path)
    return found


def _of_tar(path: Path, archive: tarfile.TarFile) -> StoredFiles:
    found: StoredFiles = {}
    links: dict[str, str] = {}
    for count, member in enumerate(archive):
        if count >= MAX_MEMBERS:
            raise _too_many(path)
        name = posixpath.normpath(member.name)
        if member.isreg() and not member.issparse():
            if name in found:
                raise Hopeless(f"cannot use {path}: it contains {name[:120]} twice", code="unsafe_archive")
            found[name] = StoredFile(path, member.offset_data, member.size)
        elif member.issym():
            links[name] = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
        elif member.islnk():
            links[name] = posixpath.normpath(member.linkname)
    for name, target in links.items():
        if target in found and name not in found:
            found[name] = found[target]
    return found


def _too_many(path: Path) -> Hopeless:
    return Hopeless(f"cannot use {path}: it has more than {MAX_MEMBERS} files", code="archive_too_large")
