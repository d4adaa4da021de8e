"""Plans an install without doing it: bytes to download, bytes reused, free space before and after.

An image does not record its unpacked size. A gzip stream ends with it and a zstd stream begins with it, so a few bytes
of each layer are read. The author of the image controls these bytes: they are an estimate for plans, and no limit may
depend on them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from enginehouse.artifact.images.sizes import hint_range, unpacked_bytes
from enginehouse.core.artifact import Artifact, Layer
from enginehouse.core.backend import Resolved, is_version
from enginehouse.core.errors import EnginehouseError
from enginehouse.core.installation import Metadata
from enginehouse.core.reference import parse_uri
from enginehouse.fetch.origins import Origin
from enginehouse.host import disk
from enginehouse.host.blocking import in_thread
from enginehouse.worker.backends.installation import Installation


class InstallPlan(Struct, frozen=True, kw_only=True):
    directory: str
    uri: str
    source: str  # where the bytes would come from
    digest: str
    platform: str
    installed_digest: str = ""
    is_current: bool = False
    total_bytes: int = 0  # as transferred
    fetch_bytes: int = 0
    reused_bytes: int = 0
    unpacked_bytes: int = 0  # 0 if unknown
    tree_bytes: int = 0  # of the installed version
    free_bytes: int = 0
    free_after_bytes: int = 0
    layers: tuple[tuple[str, int, int], ...] = ()  # digest, size, bytes already present


async def plan(installation: Installation, resolved: Resolved) -> InstallPlan:
    """Query the source and compare it with what is installed. Changes nothing."""
    trees = installation.trees
    known = await in_thread(trees.metadata_of, resolved.directory)
    tree_bytes = await in_thread(_size_of, trees.path_of(resolved.directory))
    free = disk.free_bytes(_existing(trees.backends))
    if parse_uri(resolved.uri).kind in ("package", "directory"):
        return _plain_plan(resolved, known, tree_bytes, free)
    artifact, origins = await installation.suppliers.resolve(resolved)
    held = {layer.digest: _held(installation, layer, origins) for layer in artifact.layers}
    fetch = sum({layer.digest: layer.size_bytes for layer in artifact.layers}.values()) - sum(held.values())
    unpacked = await _unpacked_bytes(artifact, origins[0], installation)
    is_current = known is not None and is_version(known.digest, artifact)
    return InstallPlan(
        directory=resolved.directory,
        uri=resolved.uri,
        source=origins[0].uri,
        digest=artifact.digest,
        platform=artifact.platform,
        installed_digest=known.digest if known else "",
        is_current=is_current,
        total_bytes=artifact.size_bytes,
        fetch_bytes=0 if is_current else fetch,
        reused_bytes=artifact.size_bytes - fetch,
        unpacked_bytes=unpacked,
        tree_bytes=tree_bytes,
        free_bytes=free,
        # The installed version is kept as the previous one, so its space is not freed.
        free_after_bytes=free if is_current else max(0, free - fetch - unpacked),
        layers=tuple((layer.digest, layer.size_bytes, held[layer.digest]) for layer in artifact.layers),
    )


def _plain_plan(resolved: Resolved, known: Metadata | None, tree_bytes: int, free: int) -> InstallPlan:
    is_current = known is not None and is_version(known.digest, resolved)
    size = 0 if is_current else resolved.size_bytes
    return InstallPlan(
        directory=resolved.directory,
        uri=resolved.uri,
        source=resolved.uri,
        digest=resolved.digest,
        platform=resolved.platform,
        installed_digest=known.digest if known else "",
        is_current=is_current,
        unpacked_bytes=resolved.size_bytes,
        tree_bytes=tree_bytes,
        free_bytes=free,
        free_after_bytes=max(0, free - size),
    )


def _held(installation: Installation, layer: Layer, origins: Sequence[Origin]) -> int:
    if any(origin.local(layer) for origin in origins):
        return layer.size_bytes
    return installation.blobs.held_bytes(layer)


async def _unpacked_bytes(artifact: Artifact, origin: Origin, installation: Installation) -> int:
    """The sum over all layers; 0 if the size of one layer is unknown."""
    total = 0
    for layer in artifact.layers:
        hint = await _hint(layer, origin, installation)
        if not hint:
            return 0
        total += hint
    return total


async def _hint(layer: Layer, origin: Origin, installation: Installation) -> int:
    start, end = hint_range(layer)
    hint = await _read(layer, start, end, origin, installation) if start < end else b""
    return unpacked_bytes(layer, hint)


async def _read(layer: Layer, start: int, end: int, origin: Origin, installation: Installation) -> bytes:
    if installation.blobs.has(layer):
        return await in_thread(_read_here, installation.blobs.path_of(layer.digest), start, end - start)
    local = origin.local(layer)
    if local is not None:
        return await in_thread(_read_here, local.path, local.offset_bytes + start, end - start)
    try:
        return b"".join([piece async for piece in origin.read(layer, start, end)])
    except EnginehouseError:
        return b""


def _read_here(path: Path, start: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size)


def _size_of(tree: Path) -> int:
    """Bytes on disk; a file with several hard links counts once."""
    seen: set[int] = set()
    total = 0
    for directory, _, files in os.walk(tree):
        for name in files:
            try:
                status = os.lstat(os.path.join(directory, name))
            except OSError:
                continue  # removed meanwhile, or in a directory that may be listed but not entered
            if status.st_ino not in seen:
                seen.add(status.st_ino)
                total += status.st_blocks * 512
    return total


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
