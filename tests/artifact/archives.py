"""Archives for tests, byte by byte: what no tar program would write, too. And trees, as something to compare.

layer = tar(directory("lib"), file("lib/a", b"x"), symlink("b", "lib/a"))
unpack(tmp_path / "ours", [layer])
reference(tmp_path / "work", [layer])        # the tree that umoci makes of the same layers
tree_of(tmp_path / "ours")                   # names, kinds, modes, contents, targets, groups of hard links
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tests.fetch.images import compress, digest_of, write_image

from enginehouse.artifact.images.inflate import Inflating
from enginehouse.artifact.images.layers import Unpacker
from enginehouse.artifact.images.sharing import Sharing
from enginehouse.artifact.images.tar import TarStream
from enginehouse.core.archive import ArchiveLimits
from enginehouse.core.artifact import Compression, Layer

MTIME = 1_700_000_000
USTAR, GNU, OLD = b"ustar\x0000", b"ustar  \0", bytes(8)
Node = tuple[str, int, str, str]  # kind, permission bits, digest of the content or target, first name of the same file


def raw(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")


def number(value: int, width: int) -> bytes:
    """Octal digits, or GNU's base 256 where they do not suffice."""
    if 0 <= value < 8 ** (width - 1):
        return f"{value:0{width - 1}o}".encode() + b"\0"
    encoded = bytearray((value % 256**width).to_bytes(width, "big"))
    encoded[0] |= 0x80
    return bytes(encoded)


def header(
    name: str | bytes,
    kind: bytes = b"0",
    *,
    size: int | bytes = 0,
    mode: int = 0o644,
    mtime: int = MTIME,
    target: str | bytes = b"",
    prefix: bytes = b"",
    magic: bytes = USTAR,
    checksum: int | None = None,
) -> bytes:
    """One block; `size` as bytes is written as it is, `checksum` replaces the right one."""
    size_field = number(size, 12) if isinstance(size, int) else size
    fields = [
        raw(name)[:100].ljust(100, b"\0"),
        number(mode, 8),
        number(0, 8) * 2,
        size_field,
        number(mtime, 12),
        b" " * 8,
        kind,
        raw(target)[:100].ljust(100, b"\0"),
        magic,
        bytes(64 + 16),
        prefix.ljust(155, b"\0"),
    ]
    block = b"".join(fields).ljust(512, b"\0")
    right = sum(block) if checksum is None else checksum
    return block[:148] + f"{right:06o}".encode() + b"\0 " + block[156:]


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def file(name: str | bytes, content: bytes = b"", mode: int = 0o644, *, mtime: int = MTIME) -> bytes:
    return long(name) + header(name, size=len(content), mode=mode, mtime=mtime) + padded(content)


def directory(name: str | bytes, mode: int = 0o755) -> bytes:
    return long(name) + header(name, b"5", mode=mode)


def symlink(name: str | bytes, target: str | bytes) -> bytes:
    return long(name, target) + header(name, b"2", mode=0o777, target=target)


def hardlink(name: str | bytes, target: str | bytes, mode: int = 0o644) -> bytes:
    return long(name, target) + header(name, b"1", mode=mode, target=target)


def long(name: str | bytes, target: str | bytes = b"") -> bytes:
    """The records that GNU puts before an entry whose names are too long for it."""
    records = b""
    for kind, text in ((b"K", raw(target)), (b"L", raw(name))):
        if len(text) > 100:
            records += header("././@LongLink", kind, size=len(text) + 1, magic=GNU) + padded(text + b"\0")
    return records


def pax(records: Mapping[str, str | bytes], kind: bytes = b"x") -> bytes:
    content = b""
    for key, value in records.items():
        body = b" " + raw(key) + b"=" + raw(value) + b"\n"
        length = len(body)
        while length != len(body) + len(str(length)):
            length = len(body) + len(str(length))
        content += str(length).encode() + body
    return header("pax", kind, size=len(content)) + padded(content)


def tar(*entries: bytes, end: bytes = bytes(1024)) -> bytes:
    return b"".join(entries) + end


def layer_of(content: bytes, compression: Compression = "gzip") -> tuple[Layer, bytes]:
    packed = compress(content, compression)
    layer = Layer(digest=digest_of(packed), size_bytes=len(packed), compression=compression, diff_id=digest_of(content))
    return layer, packed


def unpack(
    root: Path,
    layers: Iterable[bytes],
    *,
    compression: Compression = "gzip",
    limits: ArchiveLimits | None = None,
    sharing: Sharing | None = None,
) -> Unpacker:
    """The layers applied as an install does it; `root` is made."""
    return unpack_packed(root, (layer_of(content, compression) for content in layers), limits=limits, sharing=sharing)


def unpack_packed(
    root: Path,
    layers: Iterable[tuple[Layer, bytes]],
    *,
    limits: ArchiveLimits | None = None,
    sharing: Sharing | None = None,
) -> Unpacker:
    root.mkdir(exist_ok=True)
    limits = limits or ArchiveLimits()
    left = limits.total_bytes
    with Unpacker(root, sharing or Sharing(), limits) as unpacker:
        for layer, packed in layers:
            with Inflating(layer, io.BytesIO(packed), limits, left) as inflating:
                unpacker.apply(TarStream(inflating.next_buffer), lambda: False)
                inflating.check()
                left -= inflating.plain_bytes
        unpacker.finish()
    return unpacker


def reference(work: Path, layers: Sequence[bytes]) -> Path:
    """What umoci makes of the layers."""
    work.mkdir(parents=True)
    write_image(work / "image", layers)
    done = subprocess.run(
        ["umoci", "unpack", "--rootless", "--image", f"{work / 'image'}:latest", str(work / "bundle")],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return work / "bundle" / "rootfs"


def tree_of(root: Path) -> dict[bytes, Node]:
    """Everything below `root`, without the root itself."""
    found: dict[bytes, Node] = {}
    first: dict[int, bytes] = {}
    top = os.fsencode(root)
    for below, directories, files in os.walk(top):
        directories.sort()
        for name in sorted((*directories, *files)):
            path = os.path.join(below, name)
            found[os.path.relpath(path, top)] = _node(path, os.path.relpath(path, top), first)
    return found


def _node(path: bytes, name: bytes, first: dict[int, bytes]) -> Node:
    status = os.lstat(path)
    mode = status.st_mode & 0o1777
    if stat.S_ISDIR(status.st_mode):
        return "directory", mode, "", ""
    same = os.fsdecode(first.setdefault(status.st_ino, name)) if status.st_nlink > 1 else ""
    if stat.S_ISLNK(status.st_mode):
        return "symlink", 0, os.fsdecode(os.readlink(path)), same
    if stat.S_ISREG(status.st_mode):
        with open(path, "rb") as opened:
            return "file", mode, hashlib.file_digest(opened, "sha256").hexdigest(), same
    return "other", mode, "", same


def buffers(content: bytes, size: int) -> Callable[[], bytes]:
    """The content in pieces of `size` bytes, as a reader of tars wants it."""
    stream = io.BytesIO(content)
    return lambda: stream.read(size)
