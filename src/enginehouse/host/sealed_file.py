"""A file that is read completely and unchanged, or refused: a head, then frames that each know their place.

With a passphrase, frames are encrypted and authenticated (XSalsa20-Poly1305 with a key by Argon2id); without one, each
carries a SHA-256, which finds damage but no forger. The place of a frame, whether it is the last one, and the digest of
the head are part of what is checked, so frames cannot be cut off, moved or taken from another file. A file is written
beside its name with mode 0600, synced and then renamed, so it never exists half.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct
from nacl import pwhash
from nacl.exceptions import CryptoError
from nacl.secret import SecretBox
from nacl.utils import random as random_bytes

from enginehouse.core.errors import Invalid
from enginehouse.host import disk

MAX_HEAD_BYTES = 64 * 1024
MAX_FRAME_BYTES = 4 * 1024 * 1024  # a damaged length must not fill the memory
# Argon2id as libsodium recommends for a secret that is typed now and then: about a second, and 256 MiB.
OPERATIONS, MEMORY_BYTES = 3, 256 * 1024**2
MAX_MEMORY_BYTES = 1024**3  # what a file may ask for
_CHECK = b"enginehouse"  # sealed in the head, so that a wrong passphrase is told apart from damage


class PassphraseLock(Struct, frozen=True, kw_only=True):
    """How the key of a file follows from its passphrase."""

    salt: bytes
    operations: int
    memory_bytes: int
    check: bytes


class SealedHead(Struct, frozen=True, kw_only=True):
    """The readable beginning of a file."""

    about: msgspec.Raw  # of the program that wrote it
    lock: PassphraseLock | None = None  # None: not encrypted


class _Frames:
    """Seals frames in their order, or opens them."""

    def __init__(self, head: bytes, key: bytes | None) -> None:
        self._box = SecretBox(key) if key is not None else None
        self._head = sha256(head).digest()
        self._number = 0

    def _place(self, is_last: bool) -> bytes:
        place = self._head + self._number.to_bytes(8, "big") + bytes([is_last])
        self._number += 1
        return place

    def seal(self, content: bytes, *, is_last: bool) -> bytes:
        place = self._place(is_last)
        if self._box is not None:
            return bytes(self._box.encrypt(place + content))
        return sha256(place + content).digest() + content

    def open(self, frame: bytes, *, is_last: bool) -> bytes | None:
        """The content; None if it is not the frame of this place."""
        place = self._place(is_last)
        if self._box is None:
            return frame[32:] if sha256(place + frame[32:]).digest() == frame[:32] else None
        try:
            opened = self._box.decrypt(frame)
        except (CryptoError, ValueError):
            return None
        return opened[len(place) :] if opened.startswith(place) else None


def write(path: Path, magic: bytes, about: object, chunks: Iterable[bytes], passphrase: str) -> int:
    """Write a file atomically; an empty passphrase leaves it unencrypted. Returns its size in bytes."""
    lock, key = _new_lock(passphrase) if passphrase else (None, None)
    head = msgspec.json.encode(SealedHead(about=msgspec.Raw(msgspec.json.encode(about)), lock=lock))
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(Path(temporary).unlink, missing_ok=True)
        with os.fdopen(descriptor, "wb") as file:
            file.write(magic + len(head).to_bytes(4, "big") + head)
            frames = _Frames(head, key)
            for chunk in chunks:
                _write_frame(file, frames.seal(chunk, is_last=False))
            _write_frame(file, frames.seal(b"", is_last=True), is_last=True)
            size = file.tell()
            file.flush()
            os.fchmod(file.fileno(), 0o600)
            os.fsync(file.fileno())
        os.replace(temporary, path)
        on_failure.pop_all()
    disk.sync_directory(path.parent)
    return size


def read_head(path: Path, magic: bytes, what: str) -> SealedHead:
    """`what` says in errors what the file should be."""
    with path.open("rb") as file:
        return _head(file, path, magic, what)[0]


def read(path: Path, magic: bytes, what: str, passphrase: str) -> Iterator[bytes]:
    """The content, piece by piece; raises `Invalid` where the file is not what was written."""
    with path.open("rb") as file:
        head, text = _head(file, path, magic, what)
        frames = _Frames(text, _key(path, head.lock, passphrase) if head.lock is not None else None)
        is_last = False
        while not is_last:
            start = file.read(5)
            size, is_last = int.from_bytes(start[:4], "big"), start[4:] == b"\x01"
            frame = file.read(size) if len(start) == 5 and size <= MAX_FRAME_BYTES else b""
            content = frames.open(frame, is_last=is_last) if frame and len(frame) == size else None
            if content is None:
                raise damaged(path, what)
            yield content
        if file.read(1):
            raise damaged(path, what)


def damaged(path: Path, what: str) -> Invalid:
    return Invalid(
        f"cannot read {path}: this {what} is cut off or altered; use another copy", code="damaged_file", param="file"
    )


def _head(file: BinaryIO, path: Path, magic: bytes, what: str) -> tuple[SealedHead, bytes]:
    if file.read(len(magic)) != magic:
        raise Invalid(f"cannot read {path}: it is not a {what}", code="invalid_file", param="file")
    size = int.from_bytes(file.read(4), "big")
    text = file.read(size) if size <= MAX_HEAD_BYTES else b""
    try:
        if len(text) != size:
            raise damaged(path, what)
        return msgspec.json.decode(text, type=SealedHead), text
    except msgspec.MsgspecError as error:
        raise damaged(path, what) from error


def _write_frame(file: BinaryIO, frame: bytes, *, is_last: bool = False) -> None:
    file.write(len(frame).to_bytes(4, "big") + bytes([is_last]) + frame)


def _new_lock(passphrase: str) -> tuple[PassphraseLock, bytes]:
    salt = random_bytes(pwhash.argon2id.SALTBYTES)
    key = _derived(passphrase, salt, OPERATIONS, MEMORY_BYTES)
    check = bytes(SecretBox(key).encrypt(_CHECK))
    return PassphraseLock(salt=salt, operations=OPERATIONS, memory_bytes=MEMORY_BYTES, check=check), key


def _key(path: Path, lock: PassphraseLock, passphrase: str) -> bytes:
    wrong = Invalid(f"cannot open {path}: the passphrase is wrong", code="wrong_passphrase", param="passphrase")
    if not passphrase:
        raise wrong
    try:
        key = _derived(passphrase, lock.salt, lock.operations, min(lock.memory_bytes, MAX_MEMORY_BYTES))
        SecretBox(key).decrypt(lock.check)
    except (CryptoError, ValueError, TypeError) as error:
        raise wrong from error
    return key


def _derived(passphrase: str, salt: bytes, operations: int, memory_bytes: int) -> bytes:
    return pwhash.argon2id.kdf(
        SecretBox.KEY_SIZE, passphrase.encode(), salt, opslimit=min(operations, 20), memlimit=memory_bytes
    )
