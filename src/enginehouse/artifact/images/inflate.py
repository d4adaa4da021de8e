"""One layer from compressed bytes to plain ones, both hashed on the way, in bounded memory.

Runs in a thread of its own, so that inflating overlaps with writing; both let go of the interpreter while they work.
The digests are known only at the end, so whoever unpacks must not show the result before `check`.
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
QUEUED = 8  # buffers between inflating and writing: enough to even out small files, nothing for memory
_IGZIP_ERROR: type[Exception] = igzip_lib.error  # type: ignore[assignment]  # its stub calls it an instance
_MAX_WINDOW_BYTES = 64 * 1024 * 1024  # what `zstd -21` needs; more would be a way to fill our memory


class ByteSource(Protocol):
    """Compressed bytes from the beginning; `read` blocks until there are some and gives none at the end."""

    def read(self, size: int = -1, /) -> bytes: ...


class Hashed(io.RawIOBase):
    """A source that is hashed and counted as it is read."""

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
                        raise unsafe("its gzip stream is cut off")
                    plain = member.decompress(content, BUFFER_BYTES)
                    content = b""
                else:
                    plain = member.decompress(b"", BUFFER_BYTES)
                if plain:
                    yield plain
        except _IGZIP_ERROR as error:
            raise unsafe(f"its gzip stream is broken ({error})") from None
        # Streams may be written in members, one after the other; zeros after the last are padding.
        content = (member.unused_data or source.read(READ_BYTES)).lstrip(b"\0")
        while not content and (more := source.read(READ_BYTES)):
            content = more.lstrip(b"\0")


class _Framed:
    """A source whose zstd frames are followed as it is read."""

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
            raise unsafe("its zstd stream is cut off")
    except zstandard.ZstdError as error:
        if "memory" in str(error).lower() or "window" in str(error).lower():
            raise too_large(f"its zstd window is larger than {_MAX_WINDOW_BYTES // 2**20} MiB") from None
        raise unsafe(f"its zstd stream is broken ({error})") from None


def check_digest(layer: Layer, found: str, size_bytes: int) -> None:
    if found != layer.digest or size_bytes != layer.size_bytes:
        raise Hopeless(
            f"cannot use what was fetched: {size_bytes} bytes with the digest {found[:19]}…, expected "
            f"{layer.size_bytes} bytes with {layer.digest[:19]}…",
            code="digest_mismatch",
        )


class Inflating:
    """A layer being inflated ahead of its reader. Use as a context; `check` after the last buffer."""

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
            # It may be waiting to hand over a buffer that nobody wants any more.
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
            self._queue.put(item)  # whoever asks again hears it again
            raise item
        if not item:
            self._queue.put(b"")
        return item

    def skip(self) -> None:
        """Read to the end without inflating: for a digest that is wanted although the contents were refused."""
        self._skipped.set()
        with contextlib.suppress(Hopeless):
            while self.next_buffer():
                pass

    def check(self) -> None:
        """Raises where the bytes read or the bytes they became are not those that were asked for; after `skip` only
        the bytes read are known."""
        check_digest(self._layer, self._source.digest(), self._source.read_bytes)
        plain = "sha256:" + self._sha256.hexdigest()
        if self._layer.diff_id and plain != self._layer.diff_id and not self._skipped.is_set():
            raise unsafe(f"a layer unpacks to {plain[:19]}…, its image says {self._layer.diff_id[:19]}…")

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
        """Bytes changed on their way look like a broken stream: the rest is read, because the digest tells which it
        is. Not where a limit was reached: a stream that inflates so far is what it was meant to be."""
        if isinstance(error, Hopeless) and not self._is_over:
            try:
                self._read_rest()
                check_digest(self._layer, self._source.digest(), self._source.read_bytes)
            except (EnginehouseError, OSError) as worse:
                return worse
        return error

    def _read_rest(self) -> None:
        # One byte too many is enough to know that it is another blob.
        while self._source.read_bytes <= self._layer.size_bytes and self._source.read(READ_BYTES):
            if self._stopped.is_set():
                return

    def _count(self, size: int) -> None:
        self.plain_bytes += size
        free, ratio = self._limits.ratio_free_bytes, self._limits.ratio
        self._is_over = self.plain_bytes > self._allowed_bytes
        if self._is_over:
            raise too_large(f"it holds more than {self._limits.total_bytes / 2**30:.1f} GiB")
        self._is_over = self.plain_bytes > free and self.plain_bytes > ratio * self._source.read_bytes
        if self._is_over:
            raise too_large(f"it grows to more than {ratio} times its compressed size")
