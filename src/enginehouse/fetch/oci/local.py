"""Blobs on the local disk: their place, and a reader with the interface of a download.

Blocking calls run in threads. Checksums are the caller's task.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

from msgspec import Struct

from enginehouse.core.errors import Hopeless

READ_BYTES = 1024 * 1024


class LocalBlob(Struct, frozen=True):
    """A blob in a file at an offset: layers inside a tar are used in place."""

    path: Path
    offset_bytes: int = 0


async def read_local(blob: LocalBlob, start: int, end: int) -> AsyncIterator[bytes]:
    """Yield bytes [start, end) of the blob."""
    try:
        file = await asyncio.to_thread(os.open, blob.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while start < end:
                size = min(READ_BYTES, end - start)
                piece = await asyncio.to_thread(os.pread, file, size, blob.offset_bytes + start)
                if not piece:
                    raise Hopeless(
                        f"cannot read {blob.path}: the file is shorter than expected", code="digest_mismatch"
                    )
                start += len(piece)
                yield piece
        finally:
            os.close(file)
    except OSError as error:
        raise Hopeless(f"cannot read {blob.path}: {error.strerror}", code="not_found") from error
