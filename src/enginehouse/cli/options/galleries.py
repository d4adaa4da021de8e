"""Loads galleries without a server, for the commands that need none."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginehouse.cli.options.shared import given

if TYPE_CHECKING:
    from enginehouse.core.gallery_entry import Gallery, GalleryState
    from enginehouse.core.gallery_source import GallerySource
    from enginehouse.settings.programs import LocalSettings

REMIND_SECONDS = 24 * 3600.0  # a missing gallery is reported at most this often


def load_galleries(
    flags: dict[str, Any], chosen: tuple[str, ...] = ()
) -> tuple[tuple[Gallery, ...], tuple[GalleryState, ...]]:
    """Load the built-in gallery and the configured ones, or those `chosen` by path or address."""
    import asyncio
    import logging
    import os

    from enginehouse.cli.terminal.output import age, remark
    from enginehouse.fetch.galleries.sources import Sources, load_builtin
    from enginehouse.fetch.http.addresses import Rules
    from enginehouse.fetch.http.client import Client
    from enginehouse.settings.programs import LocalSettings, load

    settings = load(LocalSettings, {**flags, "data": given().data}, os.environ)
    wanted = named_sources(chosen) if chosen else settings.backend_galleries
    # Private, as every program creates it.
    with contextlib.suppress(OSError):
        settings.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The states are printed below; without a handler, warnings of the log would be printed too.
    logging.getLogger("enginehouse").addHandler(logging.NullHandler())

    missing = _MissingGalleries(settings.data / "galleries")

    async def read() -> Sources:
        sources = Sources(wanted, Client(Rules(settings.allowed_hosts)), settings.data / "galleries")
        try:
            await sources.restore()
            for name, url in sources.due:
                if not url.startswith("file:") and not missing.has(name):
                    remark(f"reading the gallery {name} …")
            await sources.refresh()
        finally:
            await sources.close()
        return sources

    sources = asyncio.run(read())
    for state in sources.states:
        if state.status == "stale" and state.age_seconds is not None:
            remark(
                f"the gallery {state.name} is {age(state.age_seconds)} old: {state.error or 'it was not read since'}"
            )
        elif state.status == "never loaded":
            missing.once(state.name, f"the gallery {state.name} is missing: {state.error}", remark)
        if state.status != "never loaded":
            missing.forget(state.name)
    return (load_builtin(), *sources.galleries), sources.states


class _MissingGalleries:
    """Remembers which galleries were reported missing, so that an offline machine reports each once a day."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.missing"

    def has(self, name: str) -> bool:
        import time

        try:
            return 0 <= time.time() - self._path(name).stat().st_mtime < REMIND_SECONDS
        except OSError:
            return False

    def once(self, name: str, sentence: str, remark: Callable[[str], None]) -> None:
        if self.has(name):
            return
        remark(sentence)
        with contextlib.suppress(OSError):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path(name).write_text(sentence + "\n")

    def forget(self, name: str) -> None:
        with contextlib.suppress(OSError):
            self._path(name).unlink(missing_ok=True)


def local_settings(flags: dict[str, Any]) -> LocalSettings:
    import os

    from enginehouse.settings.programs import LocalSettings, load

    known = {name: value for name, value in flags.items() if name in LocalSettings.__struct_fields__}
    return load(LocalSettings, {**known, "data": given().data}, os.environ)


def named_sources(chosen: tuple[str, ...]) -> tuple[GallerySource, ...]:
    """Galleries given by path or address, each with a unique name derived from it."""
    from enginehouse.core.gallery_source import BUILTIN, GallerySource, location
    from enginehouse.core.name import MAX_NAME

    found: list[GallerySource] = []
    taken = {BUILTIN}
    for text in chosen:
        url = text if re.match(r"(https?|file|github):", text) else f"file://{Path(text).expanduser().absolute()}"
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", location(url).rpartition("/")[2].partition(".")[0]).strip("-_")
        name = plain = stem[: MAX_NAME - 4] or "gallery"
        number = 1
        while name in taken:
            number += 1
            name = f"{plain}-{number}"
        taken.add(name)
        found.append(GallerySource(name=name, url=url))
    return tuple(found)
