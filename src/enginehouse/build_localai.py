"""Builds the part of a frontend that uses LocalAI's workers for models: tokens, pushes, processes, the carrier.

Called by `build_frontend` only. Everything outside is passed (`LocalaiOutside`); without it models are loaded on our
own workers alone.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from enginehouse.core.errors import Invalid
from enginehouse.fetch.models.sources import ModelFinder
from enginehouse.fetch.registry.requests import Registries
from enginehouse.frontend.delivery.collector import Collector
from enginehouse.frontend.fleet.nodes import Nodes
from enginehouse.frontend.fleet.token_files import given_token
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.localai.carrier import Carrier, CarrierParts
from enginehouse.frontend.localai.file_sources import FileSources, FindUpload
from enginehouse.frontend.localai.processes import WorkerProcesses
from enginehouse.frontend.localai.pushing import PART_BYTES, FileServers, Pusher, SourceFiles
from enginehouse.frontend.localai.requests import WorkerRequests
from enginehouse.frontend.localai.worker_tokens import WorkerTokens
from enginehouse.frontend.serving.router import Router
from enginehouse.frontend.serving.uploads import Uploads
from enginehouse.frontend.watching.views import SilenceLimits
from enginehouse.ports import Bus, Engine
from enginehouse.settings.programs import FrontendSettings
from enginehouse.store.db import Store


class LocalaiOutside(Struct, frozen=True, kw_only=True):
    """What a frontend reaches LocalAI's workers with. `secret` seals their tokens: the admin token."""

    engine: Engine
    servers: FileServers
    secret: Callable[[], str]
    open_sources: Callable[[FindUpload], SourceFiles]
    part_bytes: int = PART_BYTES


class CarrierSite(Struct, frozen=True):
    """The objects of a frontend that the carrier is built on."""

    store: Store
    bus: Bus
    nodes: Nodes
    collector: Collector
    galleries: Galleries
    router: Router
    uploads: Uploads
    owner: str
    patience: SilenceLimits


def localai_outside(
    settings: FrontendSettings,
    engine: Engine,
    servers: FileServers,
    open_sources: Callable[[FindUpload], SourceFiles],
) -> LocalaiOutside:
    def admin_token() -> str:
        """The one that this frontend was given or made; "" if it has none."""
        try:
            return given_token("admin", settings.admin_token, settings.data)
        except Invalid:
            return ""

    return LocalaiOutside(engine=engine, servers=servers, secret=admin_token, open_sources=open_sources)


def outside_sources(finder: ModelFinder, registries: Registries) -> Callable[[FindUpload], SourceFiles]:
    """The sources of models as the program has them."""

    def opened(find_upload: FindUpload) -> SourceFiles:
        return FileSources(
            client=finder.client,
            registries=registries,
            headers=finder.credentials.headers,
            find_upload=find_upload,
        )

    return opened


def make_tokens(store: Store, outside: LocalaiOutside | None) -> WorkerTokens | None:
    return WorkerTokens(store, outside.secret) if outside is not None else None


def make_carrier(site: CarrierSite, tokens: WorkerTokens | None, outside: LocalaiOutside | None) -> Carrier | None:
    if outside is None or tokens is None:
        return None
    pusher = Pusher(outside.servers, outside.open_sources(site.uploads.path), part_bytes=outside.part_bytes)
    requests = WorkerRequests(site.bus, site.owner)
    processes = WorkerProcesses(
        requests, pusher, outside.engine, site.nodes, install_seconds=site.patience.install_seconds
    )

    return Carrier(
        CarrierParts(
            store=site.store,
            bus=site.bus,
            nodes=site.nodes,
            tokens=tokens,
            requests=requests,
            pusher=pusher,
            processes=processes,
            outcomes=site.collector,
            galleries=lambda: site.galleries.encoded,
            in_flight=site.router.in_flight_to,
            owner=site.owner,
        )
    )
