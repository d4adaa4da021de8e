"""`backup` and `restore`: the database, the keys and the settings of a server in one file, and back.

A backup reads the database in one transaction while frontends go on, so it needs no server that answers and waits for
none. A restore reads the whole file before it changes anything. A new database is built beside the old one, or in one
transaction; what is replaced is moved aside, and a mark stands for the moments in which files are exchanged. Engines,
models and what was downloaded are not in a backup: workers have them, and report what they have.
"""

from __future__ import annotations

import os
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

import enginehouse
from enginehouse.core.errors import Conflict, Invalid
from enginehouse.core.key_record import RECORD, missing, read_record
from enginehouse.host import data_files, disk, sealed_file
from enginehouse.store import copying, migrating
from enginehouse.store.db import Connection

MAGIC = b"enginehouse backup 1\n"
WHAT = "backup of Enginehouse"
_FRAME_BYTES = 256 * 1024
_KEPT_BESIDE = ("lock", data_files.UNFINISHED, "logs")  # entries that do not make a data directory used


class BackupAbout(Struct, frozen=True, kw_only=True):
    """What everybody may read in a backup, an encrypted one too."""

    version: str  # of Enginehouse
    schema: str
    created_at: str


class BackedUpFile(Struct, frozen=True, tag="file"):
    name: str
    content: bytes


class BackedUpTable(Struct, frozen=True, tag="table"):
    """The rows that follow are of this table."""

    name: str
    columns: list[str]


class BackedUpRows(Struct, frozen=True, tag="rows"):
    rows: list[list[Any]]


class BackupEnd(Struct, frozen=True, tag="end"):
    rows: int


_Part = BackedUpFile | BackedUpTable | BackedUpRows | BackupEnd
_DECODER: msgspec.json.Decoder[_Part] = msgspec.json.Decoder(_Part)
_ENCODER = msgspec.json.Encoder()


class BackupSummary(Struct, frozen=True, kw_only=True):
    about: BackupAbout
    files: tuple[str, ...]
    rows: int
    is_encrypted: bool
    size_bytes: int = 0
    moved_to: str = ""  # where the replaced files are


class _Unfinished(Struct, frozen=True):
    database: str  # the restore may go on in this database, although it is no longer empty


def make(path: Path, data: Path, database_url: str, passphrase: str, *, force: bool = False) -> BackupSummary:
    """Write a backup. Another file at `path` is replaced only if it is a backup, or with `force`."""
    _check_target(path, force)
    with copying.stored_rows(database_url) as stored:
        if not stored.revision:
            raise Invalid("cannot back up this database: it has no tables of Enginehouse", code="no_database")
        about = BackupAbout(
            version=enginehouse.__version__,
            schema=stored.revision,
            created_at=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        )
        # After the transaction has begun: a key that is replaced meanwhile is the newer one.
        files = data_files.read_kept(data)
        counted = _Counted()
        try:
            chunks = _compressed(_parts(stored, files, counted))
            size = sealed_file.write(path, MAGIC, about, chunks, passphrase)
        except OSError as error:
            raise Invalid(f"cannot write {path}: {error.strerror}", code="invalid_file", param="file") from error
    return BackupSummary(
        about=about, files=tuple(files), rows=counted.rows, is_encrypted=bool(passphrase), size_bytes=size
    )


def is_encrypted(path: Path) -> bool:
    try:
        return sealed_file.read_head(path, MAGIC, WHAT).lock is not None
    except OSError as error:
        raise Invalid(f"cannot read {path}: {error.strerror}", code="invalid_file", param="file") from error


def verify(path: Path, passphrase: str) -> BackupSummary:
    """Read a backup to its end. Raises `Invalid` unless all of it is there and this program knows its schema."""
    about = _about(path)
    known = migrating.revisions()
    if about.schema not in known:
        raise Invalid(
            f"cannot restore {path}: Enginehouse {about.version} made it, with the schema {about.schema}; this program "
            f"({enginehouse.__version__}) knows up to {known[-1]}. Install that version first",
            code="newer_schema",
        )
    files: list[str] = []
    rows: int | None = None
    # To the end of the file, which is beyond the end of what it says.
    for part in _read(path, passphrase):
        if isinstance(part, BackedUpFile):
            files.append(part.name)
        elif isinstance(part, BackupEnd):
            rows = part.rows
    if rows is None:
        raise sealed_file.damaged(path, WHAT)
    return BackupSummary(about=about, files=tuple(files), rows=rows, is_encrypted=is_encrypted(path))


def restore(path: Path, data: Path, database_url: str, passphrase: str, *, force: bool = False) -> BackupSummary:
    found = verify(path, passphrase)
    goes_on = _goes_on(data, database_url)
    target = copying.sqlite_path(database_url)
    if not force and not goes_on:
        _refuse_used(data, target)
    disk.make_usable(data)
    lock = disk.Lock(data / "lock", "restore")
    try:
        contents: dict[str, bytes] = {}

        def fill(connection: Connection) -> None:
            _fill(connection, path, passphrase, contents)
            if target is None:
                _mark(data, database_url)  # from the commit that follows until the files are in their places

        if target is None:
            copying.replace_all(database_url, fill, force=force or goes_on)
            staged = None
        else:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            staged = _staging(target)
            _remove_database(staged)
            try:
                copying.create_sqlite(staged, fill)
                _sync(staged)
                copying.refuse_open_sqlite(target)
            except BaseException:
                _remove_database(staged)
                raise
            _mark(data, database_url)
        with disk.naming_the_file(data):
            moved_to = _exchange(data, contents, target, staged)
        (data / data_files.UNFINISHED).unlink()
        disk.sync_directory(data)
    finally:
        lock.release()
    return msgspec.structs.replace(found, moved_to=str(moved_to) if moved_to.exists() else "")


class _Counted:
    rows = 0


def _check_target(path: Path, force: bool) -> None:
    if path.is_dir():
        raise Invalid(f"cannot write {path}: it is a directory; name a file", code="invalid_file", param="file")
    if not path.parent.is_dir():
        raise Invalid(f"cannot write {path}: there is no directory {path.parent}", code="invalid_file", param="file")
    if force or not path.exists():
        return
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise Conflict(f"cannot write {path}: it exists and is not a backup; choose another name, or give --force")


def _parts(stored: copying.StoredRows, files: dict[str, bytes], counted: _Counted) -> Iterator[_Part]:
    yield from (BackedUpFile(name, content) for name, content in files.items())
    for name, columns in stored.tables.items():
        yield BackedUpTable(name, columns)
        for rows in stored.rows(name):
            counted.rows += len(rows)
            if name == "cluster_values":
                _check_keys(columns, rows, files, stored)
            yield BackedUpRows(rows)
    yield BackupEnd(counted.rows)


def _check_keys(columns: list[str], rows: list[list[Any]], files: dict[str, bytes], stored: copying.StoredRows) -> None:
    """A backup without the keys of its database would restore to nothing."""
    values = {row[columns.index("name")]: row[columns.index("value")] for row in rows}
    gone = missing(read_record(values.get(RECORD, "")), files, stored.token_hashes())
    if gone:
        raise Invalid(
            f"cannot back up this database without its keys: the data directory lacks {', '.join(gone)}. Give that of "
            "the server with --data",
            code="keys_missing",
            param="data",
        )


def _compressed(parts: Iterable[_Part]) -> Iterator[bytes]:
    packer, packed = zlib.compressobj(6), bytearray()
    for part in parts:
        packed += packer.compress(_ENCODER.encode(part) + b"\n")
        while len(packed) >= _FRAME_BYTES:
            yield bytes(packed[:_FRAME_BYTES])
            del packed[:_FRAME_BYTES]
    yield bytes(packed) + packer.flush()


def _about(path: Path) -> BackupAbout:
    try:
        return msgspec.json.decode(sealed_file.read_head(path, MAGIC, WHAT).about, type=BackupAbout)
    except OSError as error:
        raise Invalid(f"cannot read {path}: {error.strerror}", code="invalid_file", param="file") from error
    except msgspec.MsgspecError as error:
        raise sealed_file.damaged(path, WHAT) from error


def _read(path: Path, passphrase: str) -> Iterator[_Part]:
    unpacker, rest = zlib.decompressobj(), b""
    try:
        for frame in sealed_file.read(path, MAGIC, WHAT, passphrase):
            *lines, rest = (rest + unpacker.decompress(frame)).split(b"\n")
            yield from map(_DECODER.decode, lines)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise sealed_file.damaged(path, WHAT) from error


def _fill(connection: Connection, path: Path, passphrase: str, files: dict[str, bytes]) -> None:
    writer = copying.RowWriter(connection, _about(path).schema)
    table: BackedUpTable | None = None
    for part in _read(path, passphrase):
        match part:
            case BackedUpFile():
                files[part.name] = part.content
            case BackedUpTable():
                table = part
            case BackedUpRows():
                assert table is not None, "rows follow their table"
                writer.add(table.name, table.columns, part.rows)
            case BackupEnd():
                pass
    writer.finish()


def _refuse_used(data: Path, target: Path | None) -> None:
    if target is not None and target.exists():
        raise Conflict(f"cannot restore: there is a database at {target} already; give --force to replace it")
    staged = _staging(target).name if target is not None else ""
    names = sorted(one.name for one in data.iterdir()) if data.is_dir() else []
    used = [name for name in names if name not in _KEPT_BESIDE and not (staged and name.startswith(staged))]
    if used:
        raise Conflict(
            f"cannot restore into {data}: it is not empty ({used[0]}); choose another --data, or give --force, which "
            "replaces the database and the keys there"
        )


def _staging(target: Path) -> Path:
    return target.with_name(f".{target.name}.restoring")


def _mark(data: Path, database_url: str) -> None:
    disk.write_atomic(data / data_files.UNFINISHED, _ENCODER.encode(_Unfinished(_place(database_url))), 0o600)


def _goes_on(data: Path, database_url: str) -> bool:
    """Whether a restore into this place was interrupted while it exchanged files."""
    try:
        found = msgspec.json.decode((data / data_files.UNFINISHED).read_bytes(), type=_Unfinished)
    except (OSError, msgspec.MsgspecError):
        return False
    return found.database == _place(database_url)


def _place(database_url: str) -> str:
    return sha256(database_url.encode()).hexdigest()  # it may contain a password


def _exchange(data: Path, files: dict[str, bytes], target: Path | None, staged: Path | None) -> Path:
    """Move what is there aside and put the new files in place. Returns the directory of the old ones."""
    aside = data / f"replaced-{time.strftime('%Y-%m-%dT%H-%M-%S')}"
    for name, content in files.items():
        if name not in data_files.KEPT_FILES:
            continue  # of a later version, and a name that could lead anywhere
        path = data / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and path.read_bytes() != content:
            _move_aside(path, aside / name)
        disk.write_atomic(path, content, 0o600)
    if target is not None and staged is not None:
        if target.exists():
            _move_aside(target, aside / target.name)
        _remove_database(target)  # its log, which would be taken for that of the new one
        os.replace(staged, target)
        disk.sync_directory(target.parent)
    return aside


def _move_aside(path: Path, aside: Path) -> None:
    aside.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.move(path, aside)  # a database may be on another disk


def _remove_database(path: Path) -> None:
    for end in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + end).unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
