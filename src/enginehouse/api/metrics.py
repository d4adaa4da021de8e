"""The first figures for Prometheus: requests by model, node and status with their durations, nodes, intents, replicas.

Counters grow where things happen; gauges are set from the store when somebody asks, so that none can drift.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from enginehouse import __version__
from enginehouse.frontend.serving.router import Router
from enginehouse.store import history, nodes
from enginehouse.store.db import Connection, Store

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_HEALTHS = ("healthy", "unhealthy", "offline")
_VIOLATIONS = ("publish", "subscription", "reply", "progress", "address")
_STATES = ("accepted", "running", "waiting", "succeeded", "failed", "cancelled", "superseded")


class Metrics:
    def __init__(self, store: Store, router: Router, violations: Sequence[Mapping[str, int]] = ()) -> None:
        """`violations`: how often each kind of refused message was seen, as it is counted where it is seen."""
        self._store = store
        self._router = router
        self._violations = violations
        self.registry = CollectorRegistry()
        build = Gauge("enginehouse_build", "The version that runs.", ["version"], registry=self.registry)
        build.labels(__version__).set(1)
        labels = ["model", "node", "path", "status"]
        self._requests = Counter("enginehouse_requests", "Inference requests answered.", labels, registry=self.registry)
        self._seconds = Histogram(
            "enginehouse_request_seconds",
            "From request to end of answer.",
            ["model", "path"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._first_byte = Histogram(
            "enginehouse_first_byte_seconds",
            "From request to first byte of the answer.",
            ["model", "path"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._denied = Counter(
            "enginehouse_denied", "Requests without a right to ask.", ["code"], registry=self.registry
        )
        self._bus_violations = Counter(
            "enginehouse_bus_violations",
            "Messages that their sender had no right to send, or to hear.",
            ["kind"],
            registry=self.registry,
        )
        self._told_violations: dict[str, int] = {}
        self._nodes = Gauge("enginehouse_nodes", "Approved nodes by health.", ["health"], registry=self.registry)
        self._intents = Gauge("enginehouse_intents", "Intents by state.", ["state"], registry=self.registry)
        self._replicas = Gauge("enginehouse_replicas", "Ready replicas.", ["model", "node"], registry=self.registry)
        self._in_flight = Gauge("enginehouse_in_flight", "Requests under way here.", registry=self.registry)

    def request_done(
        self, *, model: str, node: str, path: str, status: int, seconds: float, first_byte_seconds: float | None
    ) -> None:
        self._requests.labels(model, node, path, str(status)).inc()
        self._seconds.labels(model, path).observe(seconds)
        if first_byte_seconds is not None:
            self._first_byte.labels(model, path).observe(first_byte_seconds)

    def denied(self, code: str) -> None:
        self._denied.labels(code).inc()

    def _counted(self) -> dict[str, int]:
        return {kind: count for counts in self._violations for kind, count in counts.items()}

    async def render(self) -> bytes:
        def work(connection: Connection) -> tuple[dict[str, int], dict[str, int]]:
            return nodes.count_by_health(connection), history.count_by_state(connection)

        by_health, by_state = await self._store.transaction(work)
        for health in _HEALTHS:
            self._nodes.labels(health).set(by_health.get(health, 0))
        for state in _STATES:
            self._intents.labels(state).set(by_state.get(state, 0))
        self._replicas.clear()
        for route in self._router.routes():
            self._replicas.labels(route.model, route.node_name).inc()
        self._in_flight.set(self._router.in_flight)
        for kind, count in {**dict.fromkeys(_VIOLATIONS, 0), **self._counted()}.items():
            self._bus_violations.labels(kind).inc(count - self._told_violations.get(kind, 0))
            self._told_violations[kind] = count
        return generate_latest(self.registry)
