"""Statistics for Prometheus: requests by model, node and status with their durations, nodes, intents, replicas.

Counters are incremented where events happen. Gauges are set from the database and the router for every scrape, so they
cannot drift.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from enginehouse import __version__
from enginehouse.frontend.serving.router import Router
from enginehouse.frontend.watching.statistics import Statistics

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_HEALTHS = ("healthy", "unhealthy", "offline")
_VIOLATIONS = ("publish", "subscription", "reply", "progress", "address")
_STATES = ("accepted", "running", "waiting", "succeeded", "failed", "cancelled", "superseded")


class Metrics:
    def __init__(self, statistics: Statistics, router: Router, violations: Sequence[Mapping[str, int]] = ()) -> None:
        """`violations` are live counts of refused messages by kind, kept by those who refuse them."""
        self._statistics = statistics
        self._router = router
        self._violations = violations
        self.registry = CollectorRegistry()
        build = Gauge("enginehouse_build", "The running version.", ["version"], registry=self.registry)
        build.labels(__version__).set(1)
        self._counters: dict[tuple[str, str, str, int], Counter] = {}
        self._durations: dict[tuple[str, str], tuple[Histogram, Histogram]] = {}
        labels = ["model", "node", "path", "status"]
        self._requests = Counter("enginehouse_requests", "Inference requests answered.", labels, registry=self.registry)
        self._seconds = Histogram(
            "enginehouse_request_seconds",
            "Seconds from request to end of answer.",
            ["model", "path"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._first_byte = Histogram(
            "enginehouse_first_byte_seconds",
            "Seconds from request to first byte of the answer.",
            ["model", "path"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._denied = Counter(
            "enginehouse_denied", "Requests refused for a missing or wrong token.", ["code"], registry=self.registry
        )
        self._bus_violations = Counter(
            "enginehouse_bus_violations",
            "Bus messages and subscriptions refused for lack of permission.",
            ["kind"],
            registry=self.registry,
        )
        self._counted_violations: dict[str, int] = {}
        self._nodes = Gauge("enginehouse_nodes", "Approved nodes by health.", ["health"], registry=self.registry)
        self._intents = Gauge("enginehouse_intents", "Intents by state.", ["state"], registry=self.registry)
        self._replicas = Gauge("enginehouse_replicas", "Ready replicas.", ["model", "node"], registry=self.registry)
        self._in_flight = Gauge("enginehouse_in_flight", "Requests in flight on this frontend.", registry=self.registry)

    def request_done(
        self, *, model: str, node: str, path: str, status: int, seconds: float, first_byte_seconds: float | None
    ) -> None:
        # Looked up here, because `labels` takes a lock and makes a string of each label.
        counter = self._counters.get((model, node, path, status))
        if counter is None:
            counter = self._counters[model, node, path, status] = self._requests.labels(model, node, path, str(status))
        durations = self._durations.get((model, path))
        if durations is None:
            durations = self._seconds.labels(model, path), self._first_byte.labels(model, path)
            self._durations[model, path] = durations
        counter.inc()
        durations[0].observe(seconds)
        if first_byte_seconds is not None:
            durations[1].observe(first_byte_seconds)

    def denied(self, code: str) -> None:
        self._denied.labels(code).inc()

    def _counted(self) -> dict[str, int]:
        return {kind: count for counts in self._violations for kind, count in counts.items()}

    async def render(self) -> bytes:
        counts = await self._statistics.counts()
        for health in _HEALTHS:
            self._nodes.labels(health).set(counts.nodes_by_health.get(health, 0))
        for state in _STATES:
            self._intents.labels(state).set(counts.intents_by_state.get(state, 0))
        self._replicas.clear()
        for route in self._router.routes():
            self._replicas.labels(route.model, route.node_name).inc()
        self._in_flight.set(self._router.in_flight)
        for kind, count in {**dict.fromkeys(_VIOLATIONS, 0), **self._counted()}.items():
            self._bus_violations.labels(kind).inc(count - self._counted_violations.get(kind, 0))
            self._counted_violations[kind] = count
        return generate_latest(self.registry)
