"""Where a backend's bytes come from: its URI, then its mirrors, resolved once for this machine.

A tag is asked for once; everything after that is by digest, on every origin. A mirror is the same thing in another
place, so it serves only what the first answer named.
"""

from __future__ import annotations

import logging

from enginehouse.core.artifact import Artifact
from enginehouse.core.backend import Resolved
from enginehouse.core.errors import EnginehouseError, Invalid, can_heal
from enginehouse.core.reference import is_digest, parse_uri
from enginehouse.fetch.http.client import Client
from enginehouse.fetch.http.patience import RetryPolicy
from enginehouse.fetch.origins import Origin, open_origin
from enginehouse.fetch.registry.requests import Registries

log = logging.getLogger(__name__)


class Suppliers:
    def __init__(self, client: Client, registries: Registries, platform: str) -> None:
        self._client = client
        self._registries = registries
        self._platform = platform

    @property
    def patience(self) -> RetryPolicy:
        return self._registries.patience

    async def close(self) -> None:
        await self._client.close()

    def origins(self, resolved: Resolved) -> list[Origin]:
        """One per place that could have it; one that cannot be used hides only itself."""
        found: list[Origin] = []
        refusals: list[Invalid] = []
        for uri in (resolved.uri, *resolved.mirrors):
            try:
                found.append(self._open(uri, resolved))
            except Invalid as error:
                refusals.append(error)
                log.warning("mirror.unusable backend=%s error=%s", resolved.directory, error)
        if not found:
            raise refusals[0]
        return found

    async def resolve(self, resolved: Resolved) -> tuple[Artifact, list[Origin]]:
        """What there is for this machine, and everywhere it can be had, the place that answered first."""
        origins = self.origins(resolved)
        failures: list[EnginehouseError] = []
        for position, origin in enumerate(origins):
            try:
                artifact = await origin.resolve(resolved.platform or self._platform)
                return artifact, [origin, *origins[:position], *origins[position + 1 :]]
            except EnginehouseError as error:
                # A mirror is the same thing, so a build that the thing does not have is not there either. All else may
                # be of this place alone: that it is closed, sends us where we may not go, or shows a page for people.
                if error.code == "unsupported_platform":
                    raise
                failures.append(error)
        raise _worst(failures)

    def _open(self, uri: str, resolved: Resolved) -> Origin:
        if is_digest(resolved.digest):
            uri = pinned(uri, resolved.digest)
        return open_origin(uri, client=self._client, registries=self._registries, sha256=resolved.sha256)


def pinned(uri: str, digest: str) -> str:
    """`uri` with its tag made irrelevant, where it is the reference of an image."""
    source = parse_uri(uri)
    if source.kind != "image" or source.image is None or source.image.digest:
        return uri
    return f"{uri}@{digest}"


def _worst(failures: list[EnginehouseError]) -> EnginehouseError:
    """What may heal, if anything may: then asking again makes sense. The other places are named too."""
    chosen = next((error for error in failures if can_heal(error)), failures[0])
    others = [error.message for error in failures if error is not chosen]
    if others:
        kind = type(chosen)
        told = kind(f"{chosen.message}; also: {'; '.join(others)}", code=chosen.code, param=chosen.param)
        told.retry_after_seconds = chosen.retry_after_seconds
        return told
    return chosen
