"""Galleries: the built-in one, and those of the configured sources with their last valid copies.

Loads and stores galleries; `core.gallery` resolves names in them. Loaded galleries can be read at any time without
waiting. `refresh` requests all due sources in parallel, and a failing source does not affect the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from enginehouse.core.gallery_entry import Gallery, GalleryState
from enginehouse.core.gallery_source import BUILTIN, GallerySource, decode_sources
from enginehouse.fetch.galleries.copies import Copy, ParseGallery
from enginehouse.fetch.galleries.documents import parse_backends, parse_models
from enginehouse.fetch.http.client import Client


def builtin_directory() -> Traversable:
    """The directory of the package's gallery, launchers and model."""
    return resources.files("enginehouse").joinpath("gallery")


@cache
def load_builtin() -> Gallery:
    """The gallery included in the package."""
    directory = builtin_directory()
    return Gallery(
        name=BUILTIN,
        url="builtin:",
        backends=parse_backends(directory.joinpath("backends.yaml").read_bytes(), BUILTIN),
        models=parse_models(directory.joinpath("models.yaml").read_bytes(), BUILTIN),
    )


class Sources:
    """The galleries of the configured sources, in order. Their copies are in `directory`."""

    def __init__(
        self,
        sources: Iterable[GallerySource],
        client: Client,
        directory: Path,
        *,
        may_read_files: bool = True,
        now: Callable[[], float] = time.time,
        parse: ParseGallery | None = None,
    ) -> None:
        self._client = client
        self.configured = tuple(sources)
        self._copies = [
            Copy(one, client, directory, may_read_files=may_read_files, now=now, parse=parse) for one in self.configured
        ]

    @property
    def galleries(self) -> tuple[Gallery, ...]:
        return tuple(copy.gallery for copy in self._copies)

    @property
    def states(self) -> tuple[GalleryState, ...]:
        return tuple(copy.state() for copy in self._copies)

    @property
    def due(self) -> tuple[tuple[str, str], ...]:
        """Names and URLs of the sources that the next `refresh` requests."""
        return tuple((copy.gallery.name, copy.gallery.url) for copy in self._copies if copy.is_due)

    async def restore(self) -> None:
        """Load the stored copies. Makes no request."""
        async with asyncio.TaskGroup() as group:
            for copy in self._copies:
                group.create_task(copy.restore())

    async def refresh(self, changed: Callable[[], None] = lambda: None) -> None:
        """Request the due sources; `changed` is called after each. Errors are recorded in their states."""

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
    """Return the built-in gallery and those of LocalAI's JSON list, as a message of a LocalAI frontend contains it.

    Copies are stored in `directory`. A gallery that cannot be loaded is empty and has the reason as its `problem`,
    which a failed lookup includes in its error. The list comes from another machine, so local files are not read.
    """
    sources = Sources(
        decode_sources(backend_galleries) if backend_galleries else (), client, directory, may_read_files=False
    )
    await sources.restore()
    await sources.refresh()
    return (load_builtin(), *sources.galleries)
