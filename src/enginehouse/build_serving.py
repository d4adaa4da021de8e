"""Builds the part of a frontend that finds replicas for requests: routes, proofs, prefixes, queues, shared counts.

Called by `build_frontend` only. Everything outside is passed (`Outside`).
"""

from __future__ import annotations

from msgspec import Struct

from enginehouse.build_outside import Outside
from enginehouse.core.prefix import Thresholds
from enginehouse.frontend.localai.worker_tokens import WorkerTokens
from enginehouse.frontend.serving.counts import SharedCounts
from enginehouse.frontend.serving.load_waits import Loads
from enginehouse.frontend.serving.prefixes import Prefixes
from enginehouse.frontend.serving.proofs import Proofs
from enginehouse.frontend.serving.queues import RequestQueues
from enginehouse.frontend.serving.route_rows import RouteRows
from enginehouse.frontend.serving.router import Router, RouterParts
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
