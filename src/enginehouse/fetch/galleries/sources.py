"""Galleries: the built-in one, and those of the configured sources with the last good copies of them.

Loads and keeps; resolving is `core.gallery`'s, nothing here decides. What is known can be read at any time without
waiting; `refresh` asks the sources that are due, all at once, and one that fails leaves the others alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from enginehouse.core.entry import Gallery, GalleryState
from enginehouse.core.gallery_source import BUILTIN, GallerySource, decode_sources
from enginehouse.fetch.galleries.copies import Copy
from enginehouse.fetch.galleries.documents import parse_backends, parse_models
from enginehouse.fetch.http.client import Client

__all__ = ["Sources", "builtin_directory", "load_builtin", "load_named", "parse_backends", "parse_models"]


def builtin_directory() -> Traversable:
    """Where the package keeps its gallery, launchers and model."""
    return resources.files("enginehouse").joinpath("gallery")


@cache
def load_builtin() -> Gallery:
    """The gallery that comes with the package."""
    directory = builtin_directory()
    return Gallery(
        name=BUILTIN,
        url="builtin:",
        backends=parse_backends(directory.joinpath("backends.yaml").read_bytes(), BUILTIN),
        models=parse_models(directory.joinpath("models.yaml").read_bytes(), BUILTIN),
    )


class Sources:
    """The galleries of the configured sources, in their order. `directory` keeps the copies."""

    def __init__(
        self,
        sources: Iterable[GallerySource],
        client: Client,
        directory: Path,
        *,
        may_read_files: bool = True,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self.configured = tuple(sources)
        self._copies = [Copy(one, client, directory, may_read_files=may_read_files, now=now) for one in self.configured]

    @property
    def galleries(self) -> tuple[Gallery, ...]:
        return tuple(copy.gallery for copy in self._copies)

    @property
    def states(self) -> tuple[GalleryState, ...]:
        return tuple(copy.state() for copy in self._copies)

    @property
    def due(self) -> tuple[tuple[str, str], ...]:
        """Names and addresses of those that the next `refresh` asks for."""
        return tuple((copy.gallery.name, copy.gallery.url) for copy in self._copies if copy.is_due)

    async def restore(self) -> None:
        """Take the copies that were kept. No network."""
        async with asyncio.TaskGroup() as group:
            for copy in self._copies:
                group.create_task(copy.restore())

    async def refresh(self, changed: Callable[[], None] = lambda: None) -> None:
        """Ask the sources that are due; what went wrong is in their states. `changed` is called after each, so that a
        slow one holds up only itself.
        """

        async def ask(copy: Copy) -> None:
            await copy.refresh()
            changed()

        async with asyncio.TaskGroup() as group:
            for copy in self._copies:
                if copy.is_due:
                    group.create_task(ask(copy))

    async def close(self) -> None:
        await self._client.close()


async def load_named(backend_galleries: str, client: Client, directory: Path) -> tuple[Gallery, ...]:
    """The built-in gallery and those of LocalAI's JSON list, as a message of a Go frontend carries it.

    Through the copies in `directory`. A gallery that cannot be had is empty and carries the reason, which a lookup
    that finds nothing repeats. Somebody else named them, so files of this machine are not read.
    """
    sources = Sources(
        decode_sources(backend_galleries) if backend_galleries else (), client, directory, may_read_files=False
    )
    await sources.restore()
    await sources.refresh()
    return (load_builtin(), *sources.galleries)
