"""Builds the part of a frontend that finds replicas for requests: routes, proofs, prefixes, queues, shared counts; and
the one that keeps as many as are wanted.

Called by `build_frontend` only. Everything outside is passed (`Outside`).
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from enginehouse.build_outside import Outside
from enginehouse.core.prefix import Thresholds
from enginehouse.frontend.localai.worker_tokens import WorkerTokens
from enginehouse.frontend.serving.counts import SharedCounts
from enginehouse.frontend.serving.load_waits import Loads
from enginehouse.frontend.serving.loader import Loader
from enginehouse.frontend.serving.prefixes import Prefixes
from enginehouse.frontend.serving.proofs import Proofs
from enginehouse.frontend.serving.queues import RequestQueues
from enginehouse.frontend.serving.reconciler import Reconciler, ReconcilerParts
from enginehouse.frontend.serving.route_rows import RouteRows
from enginehouse.frontend.serving.router import Router, RouterParts
from enginehouse.frontend.watching.board import Board
from enginehouse.settings.programs import FrontendSettings


class RoutingParts(Struct, frozen=True, kw_only=True):
    router: Router
    proofs: Proofs
    counts: SharedCounts


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
    counts = SharedCounts(outside.bus, outside.clock, outside.owner, router)
    router.count_with(counts)
    return RoutingParts(router=router, proofs=proofs, counts=counts)


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
    )
    return Reconciler(parts)
