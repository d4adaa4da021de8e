"""Builds the part of a frontend that defines models: sources, galleries of models, uploads, rows.

Called by `build_frontend` only. `make_model_rows` gets everything outside as an argument (`ModelOutside`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from msgspec import Struct

from enginehouse.core.address import Endpoint, plain_host
from enginehouse.core.errors import Invalid
from enginehouse.fetch.galleries.model_index import BaseDocuments, with_models
from enginehouse.fetch.galleries.sources import Sources
from enginehouse.fetch.http.addresses import ParsedRules, Rules
from enginehouse.fetch.http.client import Client
from enginehouse.fetch.http.retries import RetryPolicy
from enginehouse.fetch.models.credentials import ModelCredentials
from enginehouse.fetch.models.sources import ModelFinder, SourceOptions
from enginehouse.fetch.registry.requests import Registries
from enginehouse.frontend.fleet.nodes import AddressRules
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.operations.versions import LIMIT_SECONDS
from enginehouse.frontend.serving.catalogue import ModelCatalogue
from enginehouse.frontend.serving.definitions import DefinitionParts, Definitions
from enginehouse.frontend.serving.drafts import CheckEndpoint, Drafts
from enginehouse.frontend.serving.installs import InstallParts, ModelInstalls
from enginehouse.frontend.serving.loader import Loader
from enginehouse.frontend.serving.uploads import Uploads
from enginehouse.frontend.watching.board import Board
from enginehouse.host import listen
from enginehouse.settings.file import read_credentials, read_model_credentials
from enginehouse.settings.programs import FrontendSettings
from enginehouse.store.db import Store

RESOLVE_SECONDS = 2.0  # for the name of a server elsewhere


class ModelOutside(Struct, frozen=True, kw_only=True):
    """Where models come from. Without sources only models of the built-in gallery can be added."""

    sources: ModelFinder | None = None
    galleries: Sources | None = None
    check_endpoint: CheckEndpoint | None = None
    uploads: Path = Path("uploads")

    def key_of(self, credential: str) -> str:
        """The value of a credential, for a server elsewhere; "" without one."""
        return self.sources.credentials.value(credential) if credential and self.sources is not None else ""


class ModelRowParts(Struct, frozen=True, kw_only=True):
    """The objects of a frontend that model rows are built on."""

    store: Store
    board: Board
    galleries: Galleries
    loader: Loader
    wake: Callable[[], None]


class ModelRows(Struct, frozen=True, kw_only=True):
    """The objects that define models."""

    definitions: Definitions
    installs: ModelInstalls
    catalogue: ModelCatalogue
    uploads: Uploads


def make_model_rows(parts: ModelRowParts, outside: ModelOutside) -> ModelRows:
    sources, store, galleries = outside.sources, parts.store, parts.galleries
    uploads = Uploads(outside.uploads, store)
    drafts = Drafts(store, galleries, sources, outside.check_endpoint, uploads)
    documents = BaseDocuments(sources.client) if sources is not None else None
    catalogue = ModelCatalogue(outside.galleries, documents, sources)
    definitions = Definitions(
        DefinitionParts(
            store=store,
            board=parts.board,
            galleries=galleries,
            loader=parts.loader,
            drafts=drafts,
            wake=parts.wake,
        )
    )
    installs = ModelInstalls(
        InstallParts(
            store=store,
            galleries=galleries,
            definitions=definitions,
            drafts=drafts,
            catalogue=catalogue,
            client=sources.client if sources is not None else None,
        )
    )
    return ModelRows(definitions=definitions, installs=installs, catalogue=catalogue, uploads=uploads)


def model_outside(settings: FrontendSettings, client: Client, rules: Rules, addresses: AddressRules) -> ModelOutside:
    """Create the real sources of models. They share the client with the galleries, which close it."""
    credentials = ModelCredentials(read_model_credentials(settings.model_credentials), os.environ)
    directory = settings.data / "model-galleries"
    return ModelOutside(
        sources=ModelFinder(
            client, registries_of(rules, settings), credentials, SourceOptions(huggingface=settings.hf_endpoint)
        ),
        galleries=Sources(settings.model_galleries, client, directory, parse=with_models),
        check_endpoint=partial(_checked_endpoint, rules=ParsedRules(rules), addresses=addresses),
        uploads=settings.data / "uploads",
    )


async def _checked_endpoint(url: str, *, rules: ParsedRules, addresses: AddressRules) -> str:
    """Return host:port of a server elsewhere, with the address that its name has now: it is not resolved again."""
    target = rules.check_url(url)
    if target.scheme != "http":
        raise Invalid(
            f"cannot use {url}: servers elsewhere are reached by plain http; put a proxy beside it, or use a tunnel",
            code="unsupported",
            param="source",
        )
    found = (
        [str(target.address)]
        if target.address is not None
        else sorted(await listen.resolve_within(target.host, limit_seconds=RESOLVE_SECONDS))
    )
    if not found:
        raise Invalid(f"cannot resolve {target.host}: check the name", code="invalid_uri", param="source")
    for one in found:
        rules.check_address(target.host, target.port, ip_address(one))
        if Endpoint(plain_host(one), target.port) in addresses.taken:
            raise Invalid(
                f"cannot use {url}: this address belongs to the cluster itself", code="uri_not_allowed", param="source"
            )
    return f"[{found[0]}]:{target.port}" if ":" in found[0] else f"{found[0]}:{target.port}"


def registries_of(rules: Rules, settings: FrontendSettings) -> Registries:
    return Registries(
        rules,
        environment=os.environ,
        credentials=read_credentials(settings.registry_credentials),
        patience=RetryPolicy(tries=2, total_seconds=LIMIT_SECONDS),
    )
