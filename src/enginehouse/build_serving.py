"""Builds the part of a frontend that finds replicas for requests: routes, proofs, prefixes, queues, shared counts; the
figures of all that; the rows of models; the parts that load, and that keep as many replicas as are wanted.

Called by `build_frontend` only. Everything outside is passed (`Outside`).
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from enginehouse.api.metrics import Metrics
from enginehouse.build_outside import Outside
from enginehouse.core.prefix import Thresholds
from enginehouse.fetch.galleries.model_index import BaseDocuments
from enginehouse.frontend.delivery.collector import Collector
from enginehouse.frontend.localai.carrier import Carrier
from enginehouse.frontend.localai.worker_tokens import WorkerTokens
from enginehouse.frontend.serving.catalogue import ModelCatalogue
from enginehouse.frontend.serving.counts import SharedCounts
from enginehouse.frontend.serving.definitions import DefinitionParts, Definitions
from enginehouse.frontend.serving.drafts import Drafts
from enginehouse.frontend.serving.installs import InstallParts, ModelInstalls
from enginehouse.frontend.serving.load_waits import Loads
from enginehouse.frontend.serving.loader import Loader
from enginehouse.frontend.serving.prefixes import Prefixes
from enginehouse.frontend.serving.proofs import Proofs
from enginehouse.frontend.serving.queues import RequestQueues
from enginehouse.frontend.serving.reconciler import Reconciler, ReconcilerParts
from enginehouse.frontend.serving.route_rows import RouteRows
from enginehouse.frontend.serving.router import Router, RouterParts
from enginehouse.frontend.serving.uploads import Uploads
from enginehouse.frontend.watching.board import Board
from enginehouse.frontend.watching.events import Events
from enginehouse.frontend.watching.pulse import Pulse
from enginehouse.frontend.watching.statistics import Statistics
from enginehouse.frontend.watching.traffic import TrafficCounts
from enginehouse.loop import Wakes
from enginehouse.settings.programs import FrontendSettings


class ModelRows(Struct, frozen=True, kw_only=True):
    """The objects that define models."""

    definitions: Definitions
    installs: ModelInstalls
    catalogue: ModelCatalogue
    uploads: Uploads


class RoutingParts(Struct, frozen=True, kw_only=True):
    router: Router
    proofs: Proofs
    counts: SharedCounts
    traffic: TrafficCounts


def make_routing(
    settings: FrontendSettings, outside: Outside, loads: Loads, tokens: WorkerTokens | None
) -> RoutingParts:
    proofs = Proofs(outside.bus, outside.clock, outside.owner)
    prefixes = Prefixes(
        outside.clock.monotonic,
        default=Thresholds() if settings.prefix_cache else None,
        ttl_seconds=settings.prefix_cache_ttl_seconds,
    )
    router = Router(
        outside.store,
        loads,
        wait_seconds=settings.model_load_wait_seconds or None,
        memory_seconds=settings.route_memory_seconds,
        parts=RouterParts(
            rows=RouteRows(outside.models.key_of, tokens),
            proofs=proofs,
            prefixes=prefixes,
            queues=RequestQueues(length=settings.queue_length, wait_seconds=settings.queue_wait_seconds),
        ),
    )
    traffic = TrafficCounts()
    counts = SharedCounts(outside.bus, outside.clock, outside.owner, router, traffic)
    router.count_with(counts)
    return RoutingParts(router=router, proofs=proofs, counts=counts, traffic=traffic)


def make_pulse(settings: FrontendSettings, outside: Outside, events: Events, routing: RoutingParts) -> Pulse:
    return Pulse(
        outside.store,
        events,
        outside.clock,
        routing.traffic,
        routing.counts.occupancy,
        stale_seconds=settings.stale_seconds,
    )


def make_reconciler(
    outside: Outside, board: Board, loader: Loader, router: Router, wake: Callable[[], None], lease_seconds: float
) -> Reconciler:
    parts = ReconcilerParts(
        store=outside.store,
        board=board,
        galleries=outside.galleries,
        loader=loader,
        traffic=router,
        wake=wake,
        owner=outside.owner,
        lease_seconds=lease_seconds,
        has_carrier=outside.localai is not None,
        pace=outside.pace,
    )
    return Reconciler(parts)


def make_loader(outside: Outside, board: Board, wakes: Wakes, lease_seconds: float) -> Loader:
    loader = Loader(
        outside.store,
        board,
        outside.galleries,
        owner=outside.owner,
        lease_seconds=lease_seconds,
        has_carrier=outside.localai is not None,
        pace=outside.pace,
    )
    loader.on_step(wakes.of("load", "dispatch", "route", "reconcile"))
    return loader


def make_model_rows(outside: Outside, board: Board, loader: Loader, wakes: Wakes) -> ModelRows:
    sources, store, galleries = outside.models.sources, outside.store, outside.galleries
    uploads = Uploads(outside.models.uploads, store)
    drafts = Drafts(store, galleries, sources, outside.models.check_endpoint, uploads)
    documents = BaseDocuments(sources.client) if sources is not None else None
    catalogue = ModelCatalogue(outside.models.galleries, documents, sources)
    definitions = Definitions(
        DefinitionParts(
            store=store,
            board=board,
            galleries=galleries,
            loader=loader,
            drafts=drafts,
            wake=wakes.of("load", "dispatch", "route", "reconcile"),
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


def make_metrics(
    outside: Outside, router: Router, loader: Loader, collector: Collector, carrier: Carrier | None
) -> Metrics:
    violations = [collector.violations, *([outside.violation_log.counts] if outside.violation_log is not None else [])]
    metrics = Metrics(Statistics(outside.store), router, violations)
    if carrier is not None:
        metrics.staged = carrier.sent_bytes
    loader.on_ended(metrics.load_ended)
    return metrics
