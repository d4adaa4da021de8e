"""One remote gallery: its locations, and the last valid copy of it on disk.

A copy is replaced only by a document that parses and has entries, so a broken source makes the copy old but not
unusable. Locations are tried in order; one that fails is skipped for a while, unless all of them have failed.
Refreshes are conditional requests, so an unchanged gallery costs one small response.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from enginehouse.core.errors import EnginehouseError, Hopeless, Invalid, NotFound
from enginehouse.core.gallery_entry import Gallery, GalleryState
from enginehouse.core.gallery_source import GallerySource, candidates, location
from enginehouse.core.reference import shown_uri
from enginehouse.fetch.galleries.documents import MAX_DOCUMENT_BYTES, read_backends
from enginehouse.fetch.http.client import Client

log = logging.getLogger(__name__)

REFRESH_SECONDS = 3600.0  # as in LocalAI
REFRESH_FILE_SECONDS = 10.0  # checking a file is cheap, and edits should show soon
FIRST_RETRY_SECONDS = 30.0
SKIP_SECONDS = 600.0  # as in LocalAI: the pause before a failed location is tried again
FETCH_SECONDS = 120.0
MAX_REFERENCE_BYTES = 4096
NOT_YET = "it has not been fetched yet"


# Returns the gallery with the entries of a document. Blocks; raises `Invalid` if it has none.
ParseGallery = Callable[[Gallery, bytes], Gallery]


def with_backends(gallery: Gallery, body: bytes) -> Gallery:
    entries, skipped = read_backends(body, gallery.name)
    if not entries:
        raise Invalid(
            f"cannot use the gallery {gallery.name}: it has no usable entries; check its URL", code="unsupported"
        )
    return replace(gallery, backends=entries, skipped=skipped, problem="", is_expected=False)


class StoredCopy(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Metadata of a copy, stored beside it."""

    url: str
    found_at: str
    validator: str = ""  # an ETag, or the identity of a file
    sha256: str = ""
    confirmed_at: float = 0.0


class Copy:
    """The copy of one source. `restore` and `refresh` change it; `gallery` and `state` never wait."""

    def __init__(
        self,
        source: GallerySource,
        client: Client,
        directory: Path,
        *,
        may_read_files: bool = True,
        now: Callable[[], float] = time.time,
        parse: ParseGallery | None = None,
    ) -> None:
        self.gallery = Gallery(
            name=source.name,
            url=source.url,
            demands_signatures=bool(source.verification),
            problem=NOT_YET,
            is_expected=True,
        )
        self._source = source
        self._client = client
        self._may_read_files = may_read_files
        self._now = now
        self._parsed_into = parse or with_backends
        name = hashlib.sha256(source.url.encode()).hexdigest()
        self._document = directory / f"{name}.yaml"
        self._about = directory / f"{name}.json"
        self._kept: StoredCopy | None = None
        self._skipped_until: dict[str, float] = {}
        self._checked_at = 0.0
        self._due_at = 0.0
        self._failures = 0
        self._error = ""

    @property
    def is_due(self) -> bool:
        # Also due if the clock was set back; otherwise it would wait until the old time is reached again.
        return not self._checked_at <= self._now() < self._due_at

    def state(self) -> GalleryState:
        age = max(0.0, self._now() - self._kept.confirmed_at) if self._kept else None
        is_old = self._error or (age is not None and age > 2 * REFRESH_SECONDS)
        return GalleryState(
            name=self._source.name,
            url=self._source.url.partition("?")[0],  # the query may contain a secret
            status="never loaded" if self._kept is None else "stale" if is_old else "fresh",
            age_seconds=age,
            error=self._error,
            entries=len(self.gallery.backends) + len(self.gallery.offers),
            skipped=self.gallery.skipped,
        )

    async def restore(self) -> None:
        """Load the copy of an earlier run, if it is usable."""
        found = await asyncio.to_thread(self._read_copy)
        if found is not None:
            self.gallery, self._kept = found
            self._checked_at = self._kept.confirmed_at
            # A file may have been edited since, and checking it is cheap.
            is_file = self._kept.found_at.startswith("file:")
            self._due_at = 0.0 if is_file else self._checked_at + self._refresh_seconds()

    async def refresh(self) -> None:
        """Request the source. Errors are recorded in the state and never raised."""
        now = self._now()
        places = candidates(self._source)
        asked = [url for url in places if not now < self._skipped_until.get(url, 0.0) <= now + SKIP_SECONDS] or places
        errors: list[str] = []
        for url in asked:
            try:
                await self._fetch(location(url))
            except EnginehouseError as error:
                self._skipped_until[url] = now + SKIP_SECONDS
                errors.append(error.message)
                log.warning("gallery.source_failed gallery=%s error=%s", self._source.name, error)
            else:
                self._skipped_until.pop(url, None)
                break
        self._checked_at = self._now()
        if len(errors) < len(asked):
            self._error, self._failures = "", 0
            self._due_at = self._checked_at + self._refresh_seconds()
            return
        self._error = "; ".join(errors)
        pause = min(FIRST_RETRY_SECONDS * 2 ** min(self._failures, 10), self._refresh_seconds())
        self._failures += 1
        self._due_at = self._checked_at + pause
        if self._kept is None:
            self.gallery = replace(self.gallery, problem=self._error, is_expected=False)

    def _refresh_seconds(self) -> float:
        return REFRESH_FILE_SECONDS if self._source.url.startswith("file:") else REFRESH_SECONDS

    async def _fetch(self, place: str) -> None:
        if place.endswith(".ref"):
            place = _referenced(place, await self._read(place, "", MAX_REFERENCE_BYTES))
        known = self._kept.validator if self._kept and self._kept.found_at == place else ""
        found = await self._read(place, known, MAX_DOCUMENT_BYTES)
        kept = self._kept
        if found is not None:
            body, validator = found
            digest = hashlib.sha256(body).hexdigest()
            if kept is None or kept.sha256 != digest:
                self.gallery = await asyncio.to_thread(self._parsed, body)
                await asyncio.to_thread(self._write, self._document, body)
            kept = StoredCopy(url=self._source.url, found_at=place, validator=validator, sha256=digest)
        assert kept is not None, "a document without a copy cannot be unchanged"
        self._kept = replace(kept, confirmed_at=self._now())
        await asyncio.to_thread(self._write, self._about, msgspec.json.encode(self._kept))

    async def _read(self, place: str, validator: str, limit_bytes: int) -> tuple[bytes, str] | None:
        """Return the body and its validator, or None if the document still matches `validator`."""
        if place.startswith("file:"):
            if not self._may_read_files:
                raise Invalid(
                    f"cannot read {shown_uri(place)}: a remote frontend named it, and it may not name local files",
                    code="uri_not_allowed",
                )
            return await asyncio.to_thread(read_file, Path(unquote(place.removeprefix("file://"))), validator)
        headers = {"if-none-match": validator} if validator else {}
        answer = await self._client.document(
            place, limit_bytes=limit_bytes, headers=headers, total_seconds=FETCH_SECONDS
        )
        if answer.status == 304 and validator:
            return None
        if answer.status != 200:
            raise Hopeless(f"cannot read {shown_uri(place)}: the server answered with status {answer.status}")
        return answer.body, answer.headers.get("etag", "")

    def _parsed(self, body: bytes) -> Gallery:
        return self._parsed_into(self.gallery, body)

    def _read_copy(self) -> tuple[Gallery, StoredCopy] | None:
        try:
            body = self._document.read_bytes()
            kept = msgspec.json.decode(self._about.read_bytes(), type=StoredCopy)
            if kept.sha256 != hashlib.sha256(body).hexdigest():
                # The program ended between the two writes: the document is valid, but its age is unknown.
                kept = StoredCopy(url=self._source.url, found_at="")
            return self._parsed(body), kept
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, EnginehouseError) as error:
            log.warning("gallery.copy_refused gallery=%s error=%s", self._source.name, error)
            return None

    def _write(self, path: Path, content: bytes) -> None:
        """Write atomically. A failure is only logged, because the gallery works without its copy."""
        temporary = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            log.warning("gallery.copy_write_failed gallery=%s error=%s", self._source.name, error)
            if temporary:
                Path(temporary).unlink(missing_ok=True)


def read_file(path: Path, validator: str) -> tuple[bytes, str] | None:
    """Return the content of a regular file and its identity, or None if that still is `validator`. Blocks."""
    try:
        # Non-blocking, so that opening a named pipe does not hang. Links are followed: the operator chose this file.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise Invalid(f"cannot read {path}: it is not a regular file", code="invalid_uri")
            identity = f"{facts.st_ino}-{facts.st_mtime_ns}-{facts.st_size}"
            return None if identity == validator else (file.read(MAX_DOCUMENT_BYTES + 1), identity)
    except FileNotFoundError:
        raise NotFound(f"cannot read {path}: no such file", code="not_found") from None
    except (OSError, ValueError) as error:
        raise Hopeless(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _referenced(place: str, found: tuple[bytes, str] | None) -> str:
    """Return the location of the document that a `.ref` file names, relative to that file."""
    name = (found[0] if found else b"").decode("ascii", "replace").strip()
    parts = name.split("/")
    if not name or len(name) > MAX_REFERENCE_BYTES // 4 or not name.isascii() or not name.isprintable() or "" in parts:
        raise Invalid(
            f"cannot follow {shown_uri(place)}: it must contain the name of a file in its directory", code="invalid_uri"
        )
    if ".." in parts or set(" :?#%\\") & set(name):
        raise Invalid(
            f"cannot follow {shown_uri(place)} to {shown_uri(name)}: the target is outside its directory",
            code="invalid_uri",
        )
    return f"{place.rpartition('/')[0]}/{name}"
