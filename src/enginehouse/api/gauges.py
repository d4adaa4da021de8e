"""The page of metrics: gauges, which are set for every scrape, and the counts of `api.metrics`.

The only module that imports the library of metrics at its top. It is imported with the first scrape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from enginehouse import __version__
from enginehouse.api.tallies import Distribution, Tally
from enginehouse.frontend.serving.router import Router
from enginehouse.frontend.watching.statistics import REPLICA_STATES, ClusterCounts

_HEALTHS = ("healthy", "unhealthy", "offline")
_STATES = ("accepted", "running", "waiting", "succeeded", "failed", "cancelled", "superseded")
_RESOURCES = {"ram": ("available_ram", "total_ram"), "vram": ("available_vram", "total_vram")}
_RESOURCES["disk"] = ("available_disk", "total_disk")


class _Counted(Collector):
    """What is counted where it happens."""

    def __init__(self, families: Sequence[Tally | Distribution]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return [one.family() for one in self._families]


class Gauges:
    """What is set for every scrape, and the page with it and with what was counted."""

    def __init__(self, families: Sequence[Tally | Distribution]) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Counted(families))

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"enginehouse_{name}", text, labels, registry=registry)

        gauge("build", "The running version.", "version").labels(__version__).set(1)
        self.nodes = gauge("nodes", "Approved nodes by health.", "health")
        self.up = gauge("node_up", "1 if an approved node is healthy.", "node")
        self.drained = gauge("node_drained", "1 if an approved node is drained.", "node")
        self.bus_away = gauge("node_bus_away", "1 if a node has no connection to the bus.", "node")
        self.silence = gauge("node_heartbeat_age_seconds", "Seconds since the last heartbeat of a node.", "node")
        self.available = gauge("node_available_bytes", "Free memory and disk of a node.", "node", "resource")
        self.total = gauge("node_total_bytes", "Memory and disk of a node.", "node", "resource")
        self.intents = gauge("intents", "Intents by state.", "state")
        self.operations = gauge("operations", "Operations that are kept, by outcome.", "kind", "outcome")
        self.replicas = gauge("replicas", "Ready replicas that get requests.", "model", "node")
        self.model_replicas = gauge("model_replicas", "Replicas of the cluster by state.", "model", "state")
        self.in_flight = gauge("in_flight", "Requests in flight on this frontend.")
        self.model_in_flight = gauge("model_in_flight", "Requests that a replica is answering.", "model", "node")
        self.waiting = gauge("model_waiting", "Requests that wait for a load.", "model")
        self.queued = gauge("model_queued", "Requests that wait for a replica that is not full.", "model")

    def set_cluster(self, counts: ClusterCounts) -> None:
        for health in _HEALTHS:
            self.nodes.labels(health).set(counts.nodes_by_health.get(health, 0))
        for state in _STATES:
            self.intents.labels(state).set(counts.intents_by_state.get(state, 0))
        for one in (self.up, self.drained, self.bus_away, self.silence, self.available, self.total):
            one.clear()  # nodes that were removed are shown no more
        for node in counts.nodes:
            self.up.labels(node.name).set(node.health == "healthy")
            self.drained.labels(node.name).set(node.drained)
            self.bus_away.labels(node.name).set(node.bus_away)
            self.silence.labels(node.name).set(node.silence_seconds)
            for resource, (available, total) in _RESOURCES.items():
                # 0 means not reported: a machine may have no GPU, and some workers report only what is free.
                if getattr(node.capacity, total) or getattr(node.capacity, available):
                    self.available.labels(node.name, resource).set(getattr(node.capacity, available))
                if getattr(node.capacity, total):
                    self.total.labels(node.name, resource).set(getattr(node.capacity, total))
        self.operations.clear()
        for (kind, outcome), count in counts.operations.items():
            self.operations.labels(kind, outcome or "open").set(count)
        self.model_replicas.clear()
        for model in {model for model, _ in counts.replicas}:
            for state in REPLICA_STATES:
                self.model_replicas.labels(model, state).set(counts.replicas.get((model, state), 0))

    def set_routes(self, router: Router) -> None:
        for one in (self.replicas, self.model_in_flight, self.waiting, self.queued):
            one.clear()
        in_flight = router.counts()
        for route in router.routes():
            self.replicas.labels(route.model, route.node_name).inc()
            self.model_in_flight.labels(route.model, route.node_name).inc(in_flight.get(route.nonce, 0))
        for model, count in router.waiting().items():
            self.waiting.labels(model).set(count)
        for model, count in router.queues.lengths().items():
            self.queued.labels(model).set(count)
        self.in_flight.set(router.in_flight)

    def render(self) -> bytes:
        return generate_latest(self._registry)
