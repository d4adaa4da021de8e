"""Requests to registries: authenticated on demand, retried on temporary errors.

`Registries` keeps the tokens of each registry (`RegistryAuthorization`) while the program runs; a `Registry` is the
view of one image on it. Documents are retried with exponential backoff. Blobs are not: their reader resumes at the byte
it has reached. Credentials are sent to the registry's own URLs only, never to a redirect target.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from enginehouse.core.errors import Hopeless, NotFound, TooLarge, Upstream, can_heal
from enginehouse.core.reference import ImageReference
from enginehouse.fetch.http.addresses import ParsedRules, Rules
from enginehouse.fetch.http.answers import Document, failure
from enginehouse.fetch.http.client import Client, OutboundRequest
from enginehouse.fetch.http.retries import RetryPolicy
from enginehouse.fetch.registry.auth import RegistryAuthorization, refused
from enginehouse.fetch.registry.credentials import Credentials

if TYPE_CHECKING:
    from enginehouse.fetch.http.connections import OutboundResponse


class Registries:
    """All registries. `credentials` maps hosts to `user:password` and takes precedence over docker's files."""

    def __init__(
        self,
        rules: Rules,
        *,
        environment: Mapping[str, str] | None = None,
        credentials: Mapping[str, str] | None = None,
        patience: RetryPolicy | None = None,
    ) -> None:
        self.patience = patience or RetryPolicy()
        self._rules = ParsedRules(rules)
        self._credentials = Credentials(environment or {}, credentials or {})
        self._authorizations: dict[str, RegistryAuthorization] = {}

    def open(self, reference: ImageReference, client: Client) -> Registry:
        url = f"{self._rules.scheme_of_registry(reference.registry)}://{reference.registry}"
        authorization = self._authorizations.setdefault(url, RegistryAuthorization(url, self._credentials))
        return Registry(reference, url, authorization, client, self.patience)


class Registry:
    """The registry of one image."""

    def __init__(
        self,
        reference: ImageReference,
        url: str,
        authorization: RegistryAuthorization,
        client: Client,
        patience: RetryPolicy,
    ) -> None:
        self.reference = reference
        self._url = f"{url}/v2/{reference.repository}"
        self._authorization = authorization
        self._client = client
        self._patience = patience

    def url(self, path: str) -> str:
        return f"{self._url}/{path}"

    async def document(self, path: str, *, accept: str, limit_bytes: int) -> Document:
        """Get a manifest or a small blob. `NotFound` names the image, because there is no fallback to another one."""
        request = OutboundRequest(url=self.url(path), headers={"accept": accept} if accept else {})
        used = self._authorization.header(self.reference)
        answer = await self._patience.retried(lambda: self._exchange(self._signed(request), limit_bytes))
        if answer.status == 401 and self._is_own(answer.url):
            await self._unlock(answer.headers, used)
            answer = await self._patience.retried(lambda: self._exchange(self._signed(request), limit_bytes))
        if answer.status == 404:
            raise NotFound(
                f"cannot find {self.reference}: it is not in the registry; check its name and tag",
                code="not_found",
            )
        if answer.status in (401, 403):
            raise refused(self.reference)
        if answer.status >= 400:
            raise failure(answer.status, str(self.reference), answer.headers)
        if answer.status != 200:
            raise Upstream(f"cannot get {self.reference}: the registry answered with status {answer.status}")
        return answer

    @asynccontextmanager
    async def open(self, url: str, headers: Mapping[str, str]) -> AsyncIterator[OutboundResponse]:
        """Open a blob at the registry or at a former redirect target. Only the registry's own URL is authenticated."""
        request, used = OutboundRequest(url=url, headers=headers), self._authorization.header(self.reference)
        async with self._client.open(self._signed(request)) as response:
            # Challenges of a redirect target are not answered: credentials are for the registry only.
            if response.status != 401 or not self._is_own(response.url):
                yield response
                return
            challenge = response.headers
        await self._unlock(challenge, used)
        async with self._client.open(self._signed(request)) as response:
            if response.status == 401:
                raise refused(self.reference)
            yield response

    async def _unlock(self, headers: Mapping[str, str], used: str) -> None:
        await self._authorization.unlock(self.reference, headers.get("www-authenticate", ""), used, self._ask_for_token)

    async def _ask_for_token(self, request: OutboundRequest, limit_bytes: int) -> Document:
        return await self._patience.retried(lambda: self._exchange(request, limit_bytes))

    async def _exchange(self, request: OutboundRequest, limit_bytes: int) -> Document:
        """One attempt. Raises on a temporary status; returns any other response to the caller."""
        try:
            answer = await self._client.exchange(request, limit_bytes, self._patience.total_seconds)
        except TooLarge as error:
            raise Hopeless(
                f"cannot use {self.reference}: one of its documents is larger than {limit_bytes} bytes",
                code="archive_too_large",
            ) from error
        refusal = failure(answer.status, str(self.reference), answer.headers)
        if answer.status >= 400 and can_heal(refusal):
            raise refusal
        return answer

    def _is_own(self, url: str) -> bool:
        return url.startswith(self._url + "/")

    def _signed(self, request: OutboundRequest) -> OutboundRequest:
        header = self._authorization.header(self.reference) if self._is_own(request.url) else ""
        return (
            OutboundRequest(url=request.url, headers={**request.headers, "authorization": header})
            if header
            else request
        )
