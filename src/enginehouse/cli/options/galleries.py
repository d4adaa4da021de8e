"""The flags for galleries and for hosts that may be reached, which several commands share; and the galleries
themselves for commands that need no server.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from enginehouse.cli.options.shared import given, setting

if TYPE_CHECKING:
    from enginehouse.core.gallery import Gallery, GalleryState
    from enginehouse.core.gallery_source import GallerySource
    from enginehouse.settings.programs import LocalSettings

Function = Callable[..., Any]
TOLD_SECONDS = 24 * 3600.0


def allow_host(function: Function) -> Function:
    # None where it was not given: only then do the variable and the file count.
    return click.option(
        "--allow-host",
        "allowed_hosts",
        multiple=True,
        metavar="HOST",
        callback=lambda context, parameter, value: value or None,
        help="A host or network that may be reached although it is not public, or http://HOST; repeatable.",
    )(function)


def installing(function: Function) -> Function:
    """The flags of everything that installs backends."""
    function = setting("backends_system_path", "Backends that came with the machine.", "DIR")(function)
    function = setting("archive_limit_bytes", "How large an image may be when it is unpacked (20GiB).", "SIZE")(
        function
    )
    function = setting("blob_cap_bytes", "How much of what was fetched is kept for later versions (20GiB).", "SIZE")(
        function
    )
    function = setting("engine_user", "Run engines as this user of the machine; the worker must be root.", "NAME")(
        function
    )
    function = setting(
        "engine_confinement", "off: engines may use whatever this user may (auto: as little as they need).", "auto|off"
    )(function)
    function = setting("registry_credentials", 'A file of lines "HOST" = "USER:PASSWORD".', "FILE")(function)
    return allow_host(function)


def galleries(function: Function) -> Function:
    """The flag of everything that reads galleries; what reaches them needs `allow_host` or `installing` too."""
    return setting(
        "backend_galleries", "Galleries after the built-in one, as LocalAI writes them; [] for none.", "JSON"
    )(function)


def load_galleries(
    flags: dict[str, Any], chosen: tuple[str, ...] = ()
) -> tuple[tuple[Gallery, ...], tuple[GalleryState, ...]]:
    """The built-in gallery and the configured ones, or those `chosen` by path or address; no server is asked."""
    import asyncio
    import logging
    import os

    from enginehouse.cli.terminal.output import age, remark
    from enginehouse.fetch.galleries.sources import Sources, load_builtin
    from enginehouse.fetch.http.client import Client, Rules
    from enginehouse.settings.programs import LocalSettings, load

    settings = load(LocalSettings, {**flags, "data": given().data}, os.environ)
    wanted = named_sources(chosen) if chosen else settings.backend_galleries
    # Private, as whatever else makes it would.
    with contextlib.suppress(OSError):
        settings.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Whoever sits before a terminal is told below, in sentences; without any handler the log would go there too.
    logging.getLogger("enginehouse").addHandler(logging.NullHandler())

    missing = _MissingGalleries(settings.data / "galleries")

    async def read() -> Sources:
        sources = Sources(wanted, Client(Rules(settings.allowed_hosts)), settings.data / "galleries")
        try:
            await sources.restore()
            for name, url in sources.due:
                if not url.startswith("file:") and not missing.has(name):
                    remark(f"asking for the gallery {name} …")
            await sources.refresh()
        finally:
            await sources.close()
        return sources

    sources = asyncio.run(read())
    for state in sources.states:
        if state.status == "stale" and state.age_seconds is not None:
            remark(f"the gallery {state.name} is {age(state.age_seconds)} old: {state.error or 'nobody asked since'}")
        elif state.status == "never loaded":
            missing.once(state.name, f"the gallery {state.name} is missing: {state.error}", remark)
        if state.status != "never loaded":
            missing.forget(state.name)
    return (load_builtin(), *sources.galleries), sources.states


class _MissingGalleries:
    """Which galleries were called missing: a machine without a network is told so once, not with every command."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.missing"

    def has(self, name: str) -> bool:
        import time

        try:
            return 0 <= time.time() - self._path(name).stat().st_mtime < TOLD_SECONDS
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
    """Galleries given by path or address, each with a name made from it."""
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
