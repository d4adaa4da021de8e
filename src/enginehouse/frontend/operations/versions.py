"""Resolves the tag of a build to a digest, by a query to its registry.

A tag is resolved once for all nodes of a request, so that all nodes get one version even if the tag moves meanwhile,
and again for every request, because a new version may have been pushed. A registry that does not answer is no reason to
refuse a request: each worker then resolves the tag itself, as LocalAI's workers do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

import msgspec
from msgspec import Struct

from enginehouse.core.artifact import Artifact
from enginehouse.core.backend import Resolved
from enginehouse.core.errors import EnginehouseError
from enginehouse.core.reference import parse_uri
from enginehouse.ports import Clock

log = logging.getLogger(__name__)

# Takes a URI, a platform and the expected sha256 of an archive.
AskRegistry = Callable[[str, str, str], Awaitable[Artifact]]

FAILED_SECONDS = 15.0  # after a failure, requests that do not insist skip the registry instead of waiting for it
LIMIT_SECONDS = 5.0  # a client waits for the answer
MAX_KNOWN = 5000  # builds times platforms of a large gallery; beyond it the oldest are dropped


class KnownVersion(Struct, frozen=True, kw_only=True):
    """The last answer of a registry, or why there is none (`failure`)."""

    asked_at: float  # monotonic
    digest: str = ""
    index_digest: str = ""
    size_bytes: int = 0
    failure: str = ""
    failed_at: float = 0.0  # monotonic


class Versions:
    def __init__(self, ask: AskRegistry, clock: Clock) -> None:
        self._ask = ask
        self._clock = clock
        self._known: dict[tuple[str, str], KnownVersion] = {}

    async def resolve(self, builds: Iterable[Resolved], *, insist: bool = True) -> None:
        """Resolve the versions of these builds, all at once; on return each has an answer or a failure. Without
        `insist`, builds whose query failed a moment ago are skipped.
        """
        asked = {_key(one): one for one in builds if _has_tag(one)}
        async with asyncio.TaskGroup() as group:
            for key, build in asked.items():
                if insist or not self._has_just_failed(key):
                    group.create_task(self._learn(key, build))
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def known(self, build: Resolved) -> KnownVersion | None:
        return self._known.get(_key(build))

    def pinned(self, build: Resolved) -> Resolved:
        """Return the build with its resolved digest; unchanged if none is known."""
        return self._with_known(build) if _has_tag(build) else build

    def renewed(self, build: Resolved) -> Resolved:
        """Return the build pinned to the digest known now, whatever it was pinned to; unchanged if none is known."""
        return self._with_known(build) if _has_tag(without_pin(build)) else build

    def _with_known(self, build: Resolved) -> Resolved:
        known = self._known.get(_key(build))
        if known is None or not known.digest or known.failure:
            return build
        return msgspec.structs.replace(build, digest=known.digest, index_digest=known.index_digest)

    def _has_just_failed(self, key: tuple[str, str]) -> bool:
        known = self._known.get(key)
        return known is not None and bool(known.failure) and known.failed_at >= self._clock.monotonic() - FAILED_SECONDS

    async def _learn(self, key: tuple[str, str], build: Resolved) -> None:
        failure = ""
        for uri in (build.uri, *build.mirrors):
            now = self._clock.monotonic()
            try:
                async with asyncio.timeout(LIMIT_SECONDS):
                    found = await self._ask(uri, build.platform, build.sha256)
            except EnginehouseError as error:
                failure = failure or error.message
            except TimeoutError:
                failure = failure or f"cannot resolve the version of {uri}: no answer within {LIMIT_SECONDS:.0f} s"
            else:
                before = self._known.pop(key, None)
                if before is None or before.failure or before.asked_at <= now:
                    before = KnownVersion(
                        asked_at=now, digest=found.digest, index_digest=found.index_digest, size_bytes=found.size_bytes
                    )
                self._known[key] = before  # of two concurrent queries the later one counts
                return
        log.info("version.unknown uri=%s platform=%s error=%s", build.uri, build.platform, failure)
        before = self._known.pop(key, None)
        # An old answer is kept for display; new requests are not pinned to it.
        if before is not None and before.digest:
            self._known[key] = msgspec.structs.replace(before, failure=failure, failed_at=self._clock.monotonic())
        else:
            now = self._clock.monotonic()
            self._known[key] = KnownVersion(asked_at=now, failure=failure, failed_at=now)


def without_pin(build: Resolved) -> Resolved:
    """Return the build as its gallery has it, without the digest that its tag was resolved to."""
    source = parse_uri(build.uri)
    if source.image is None or source.image.digest:
        return build
    return msgspec.structs.replace(build, digest="", index_digest="")


def _key(build: Resolved) -> tuple[str, str]:
    return build.uri, build.platform


def _has_tag(build: Resolved) -> bool:
    """Whether the build names a tag only, so that its version has to be resolved."""
    source = parse_uri(build.uri)
    return not build.digest and source.image is not None and not source.image.digest
