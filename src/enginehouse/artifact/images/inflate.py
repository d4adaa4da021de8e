"""Decompression of one layer in bounded memory, with digests of the compressed and the plain bytes.

Runs in a thread of its own, so that decompression overlaps with writing; both release the interpreter lock. The
digests are known only at the end, so the caller must not publish the result before `check`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import queue
import threading
from collections.abc import Iterator
from typing import IO, Protocol, cast

import zstandard
from isal import igzip_lib

from enginehouse.artifact.images.zstd_frames import Frames
from enginehouse.core.archive import ArchiveLimits, too_large, unsafe
from enginehouse.core.artifact import Compression, Layer
from enginehouse.core.errors import EnginehouseError, Hopeless

READ_BYTES = 512 * 1024
BUFFER_BYTES = 1024 * 1024
QUEUED = 8  # buffers between decompression and writing: evens out small files at little memory
_IGZIP_ERROR: type[Exception] = igzip_lib.error  # type: ignore[assignment]  # its stub declares an instance
_MAX_WINDOW_BYTES = 64 * 1024 * 1024  # the need of `zstd -21`; a larger one could exhaust memory


class ByteSource(Protocol):
    """Compressed bytes from the start. `read` blocks until bytes are available and returns none at the end."""

    def read(self, size: int = -1, /) -> bytes: ...


class Hashed(io.RawIOBase):
    """A source whose bytes are hashed and counted while they are read."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._sha256 = hashlib.sha256()
        self.read_bytes = 0

    def read(self, size: int = -1, /) -> bytes:
        content = self._source.read(size)
        self._sha256.update(content)
        self.read_bytes += len(content)
        return content

    def readable(self) -> bool:
        return True

    def digest(self) -> str:
        return "sha256:" + self._sha256.hexdigest()


def _plain(source: Hashed, compression: Compression) -> Iterator[bytes]:
    match compression:
        case "none":
            while content := source.read(BUFFER_BYTES):
                yield content
        case "gzip":
            yield from _gunzip(source)
        case "zstd":
            yield from _unzstd(source)


def _gunzip(source: Hashed) -> Iterator[bytes]:
    content = source.read(READ_BYTES)
    while content:
        member = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        try:
            while not member.eof:
                if member.needs_input:
                    if not content and not (content := source.read(READ_BYTES)):
                        raise unsafe("its gzip stream is truncated")
                    plain = member.decompress(content, BUFFER_BYTES)
                    content = b""
                else:
                    plain = member.decompress(b"", BUFFER_BYTES)
                if plain:
                    yield plain
        except _IGZIP_ERROR as error:
            raise unsafe(f"its gzip stream is broken ({error})") from None
        # A stream may consist of several members; zeros after the last one are padding.
        content = (member.unused_data or source.read(READ_BYTES)).lstrip(b"\0")
        while not content and (more := source.read(READ_BYTES)):
            content = more.lstrip(b"\0")


class _Framed:
    """A source whose zstd frames are followed while it is read."""

    def __init__(self, source: Hashed) -> None:
        self._source = source
        self.frames = Frames()

    def read(self, size: int = -1, /) -> bytes:
        content = self._source.read(size)
        self.frames.feed(content)
        return content


def _unzstd(source: Hashed) -> Iterator[bytes]:
    framed = _Framed(source)
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).stream_reader(
            cast(IO[bytes], framed), read_size=READ_BYTES, read_across_frames=True, closefd=False
        )
        while plain := reader.read(BUFFER_BYTES):
            yield plain
        if not framed.frames.is_whole:
            raise unsafe("its zstd stream is truncated")
    except zstandard.ZstdError as error:
        if "memory" in str(error).lower() or "window" in str(error).lower():
            raise too_large(f"its zstd window is larger than {_MAX_WINDOW_BYTES // 2**20} MiB") from None
        raise unsafe(f"its zstd stream is broken ({error})") from None


def check_digest(layer: Layer, found: str, size_bytes: int) -> None:
    if found != layer.digest or size_bytes != layer.size_bytes:
        raise Hopeless(
            f"cannot use the downloaded blob: it has {size_bytes} bytes and the digest {found[:19]}…, expected "
            f"{layer.size_bytes} bytes and {layer.digest[:19]}…",
            code="digest_mismatch",
        )


class Inflating:
    """Decompresses a layer ahead of its reader. A context manager; call `check` after the last buffer."""

    def __init__(self, layer: Layer, source: ByteSource, limits: ArchiveLimits, allowed_bytes: int) -> None:
        self._layer = layer
        self._source = Hashed(source)
        self._limits = limits
        self._allowed_bytes = allowed_bytes
        self._queue: queue.Queue[bytes | BaseException] = queue.Queue(QUEUED)
        self._stopped = threading.Event()
        self._skipped = threading.Event()
        self._sha256 = hashlib.sha256()
        self._is_over = False
        self.plain_bytes = 0
        self._thread = threading.Thread(target=self._run, name="inflate", daemon=True)

    def __enter__(self) -> Inflating:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        while self._thread.is_alive():
            # The thread may be blocked on a full queue.
            with contextlib.suppress(queue.Empty):
                while True:
                    self._queue.get_nowait()
            self._thread.join(0.005)

    def next_buffer(self) -> bytes:
        while True:
            try:
                item = self._queue.get(timeout=1.0)
                break
            except queue.Empty:
                if not self._thread.is_alive() and self._queue.empty():
                    raise unsafe("its reader ended unexpectedly") from None
        if isinstance(item, BaseException):
            self._queue.put(item)  # a later call raises it again
            raise item
        if not item:
            self._queue.put(b"")
        return item

    def skip(self) -> None:
        """Read to the end without decompression, to get the digest of a layer whose contents were refused."""
        self._skipped.set()
        with contextlib.suppress(Hopeless):
            while self.next_buffer():
                pass

    def check(self) -> None:
        """Raise if the digest of the compressed or plain bytes is wrong. After `skip`, the plain one is unknown."""
        check_digest(self._layer, self._source.digest(), self._source.read_bytes)
        plain = "sha256:" + self._sha256.hexdigest()
        if self._layer.diff_id and plain != self._layer.diff_id and not self._skipped.is_set():
            raise unsafe(f"the digest of an unpacked layer is {plain[:19]}…, not {self._layer.diff_id[:19]}…")

    def _run(self) -> None:
        try:
            for plain in _plain(self._source, self._layer.compression):
                self._sha256.update(plain)
                self._count(len(plain))
                self._queue.put(plain)
                if self._stopped.is_set():
                    return
                if self._skipped.is_set():
                    break
            self._read_rest()
            self._queue.put(b"")
        except (EnginehouseError, OSError) as error:
            self._queue.put(self._judged(error))

    def _judged(self, error: EnginehouseError | OSError) -> EnginehouseError | OSError:
        """Return the digest error if the blob is corrupted, else `error`.

        Corrupted bytes look like a broken stream, so the rest is read for its digest. Not after a limit was exceeded:
        such a stream is as its producer made it.
        """
        if isinstance(error, Hopeless) and not self._is_over:
            try:
                self._read_rest()
                check_digest(self._layer, self._source.digest(), self._source.read_bytes)
            except (EnginehouseError, OSError) as worse:
                return worse
        return error

    def _read_rest(self) -> None:
        # One byte too many is enough to detect another blob.
        while self._source.read_bytes <= self._layer.size_bytes and self._source.read(READ_BYTES):
            if self._stopped.is_set():
                return

    def _count(self, size: int) -> None:
        self.plain_bytes += size
        free, ratio = self._limits.ratio_free_bytes, self._limits.ratio
        self._is_over = self.plain_bytes > self._allowed_bytes
        if self._is_over:
            raise too_large(f"it contains more than {self._limits.total_bytes / 2**30:.1f} GiB")
        self._is_over = self.plain_bytes > free and self.plain_bytes > ratio * self._source.read_bytes
        if self._is_over:
            raise too_large(f"it grows to more than {ratio} times its compressed size")
