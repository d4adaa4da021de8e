"""The origins of a backend: its URI, then its mirrors, resolved once for the platform of this machine.

A tag is resolved at one origin only; all later requests are by digest, at every origin. A mirror holds the same
content, so it serves only the blobs that the resolved artifact names.
"""

from __future__ import annotations

import logging

from enginehouse.core.artifact import Artifact
from enginehouse.core.backend import Resolved
from enginehouse.core.errors import EnginehouseError, Invalid, can_heal
from enginehouse.core.reference import is_digest, parse_uri
from enginehouse.fetch.http.client import Client
from enginehouse.fetch.http.retries import RetryPolicy
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
        """Return one origin per usable URI. An invalid URI is logged and skipped; raises if all are invalid."""
        found: list[Origin] = []
        refusals: list[Invalid] = []
        for uri in (resolved.uri, *resolved.mirrors):
            try:
                found.append(self._open(uri, resolved))
            except Invalid as error:
                refusals.append(error)
                log.warning("mirror.skipped backend=%s error=%s", resolved.directory, error)
        if not found:
            raise refusals[0]
        return found

    async def resolve(self, resolved: Resolved) -> tuple[Artifact, list[Origin]]:
        """Return the artifact for this machine and its origins, the one that resolved it first."""
        origins = self.origins(resolved)
        failures: list[EnginehouseError] = []
        for position, origin in enumerate(origins):
            try:
                artifact = await origin.resolve(resolved.platform or self._platform)
                return artifact, [origin, *origins[:position], *origins[position + 1 :]]
            except EnginehouseError as error:
                # A mirror has the same content, so a platform that is missing here is missing there as well. All other
                # errors may concern this origin only: denied access, a forbidden redirect, an HTML page.
                if error.code == "unsupported_platform":
                    raise
                failures.append(error)
        raise _worst(failures)

    def _open(self, uri: str, resolved: Resolved) -> Origin:
        if is_digest(resolved.digest):
            uri = pinned(uri, resolved.digest)
        return open_origin(uri, client=self._client, registries=self._registries, sha256=resolved.sha256)


def pinned(uri: str, digest: str) -> str:
    """Return `uri` with the digest appended if it is an image reference; the digest overrides the tag."""
    source = parse_uri(uri)
    if source.kind != "image" or source.image is None or source.image.digest:
        return uri
    return f"{uri}@{digest}"


def _worst(failures: list[EnginehouseError]) -> EnginehouseError:
    """Return the first temporary error, so that the caller retries, or else the first one. Adds the other messages."""
    chosen = next((error for error in failures if can_heal(error)), failures[0])
    others = [error.message for error in failures if error is not chosen]
    if others:
        kind = type(chosen)
        joined = kind(f"{chosen.message}; also: {'; '.join(others)}", code=chosen.code, param=chosen.param)
        joined.retry_after_seconds = chosen.retry_after_seconds
        return joined
    return chosen
