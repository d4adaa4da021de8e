"""Bytes that are on this disk already: where they are, and reading them as if they came from elsewhere."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

from msgspec import Struct

from enginehouse.core.errors import Hopeless

READ_BYTES = 1024 * 1024


class LocalBlob(Struct, frozen=True):
    """A blob in a file, from a byte on: layers in a tar are used where they are."""

    path: Path
    offset_bytes: int = 0


async def read_local(blob: LocalBlob, start: int, end: int) -> AsyncIterator[bytes]:
    """Bytes [start, end) of the blob, read off the event loop."""
    try:
        file = await asyncio.to_thread(os.open, blob.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while start < end:
                size = min(READ_BYTES, end - start)
                piece = await asyncio.to_thread(os.pread, file, size, blob.offset_bytes + start)
                if not piece:
                    raise Hopeless(f"cannot read {blob.path}: it ends before its time", code="digest_mismatch")
                start += len(piece)
                yield piece
        finally:
            os.close(file)
    except OSError as error:
        raise Hopeless(f"cannot read {blob.path}: {error.strerror}", code="not_found") from error
