"""Statistics for Prometheus: requests, tokens, waits, loads, replicas, nodes and their resources, refusals.

Counters are incremented where events happen. Gauges are set from the database and the router for every scrape, so they
cannot drift. A label never has a value that a client can invent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from enginehouse import __version__
from enginehouse.api.openai import Finished
from enginehouse.api.tallies import Distribution, Tally
from enginehouse.frontend.serving.router import Router
from enginehouse.frontend.watching.statistics import REPLICA_STATES, ClusterCounts, Statistics

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_LOAD_SECONDS = (0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_SPEEDS = (1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 200, 400, 800)  # tokens per second
_LEAST_TOKENS = 2  # of an answer whose speed is measured: between the first and the last of them
_HEALTHS = ("healthy", "unhealthy", "offline")
_VIOLATIONS = ("publish", "subscription", "reply", "progress", "address")
_STATES = ("accepted", "running", "waiting", "succeeded", "failed", "cancelled", "superseded")
_RESOURCES = {"ram": ("available_ram", "total_ram"), "vram": ("available_vram", "total_vram")}
_RESOURCES["disk"] = ("available_disk", "total_disk")


class _Counters:
    """What is counted where it happens. What every request counts are tallies, which cost less."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def tally(name: str, text: str, *labels: str) -> Tally:
            return Tally(registry, f"enginehouse_{name}", text, *labels)

        def spread(name: str, text: str, bounds: Sequence[float], *labels: str) -> Distribution:
            return Distribution(registry, f"enginehouse_{name}", text, bounds, labels)

        self.requests = tally("requests", "Inference requests answered.", "model", "node", "path", "status")
        self.seconds = spread("request_seconds", "Seconds from request to end of answer.", _SECONDS, "model", "path")
        self.first_byte = spread(
            "first_byte_seconds", "Seconds from request to first byte of the answer.", _SECONDS, "model", "path"
        )
        self.first_token = spread(
            "first_token_seconds", "Seconds from request to first event of a stream.", _SECONDS, "model"
        )
        self.speed = spread(
            "stream_tokens_per_second", "Tokens per second of a stream after its first event.", _SPEEDS, "model"
        )
        self.tokens = tally("tokens", "Tokens that engines said they read and made.", "model", "kind")
        self.unreported = tally(
            "usage_unreported", "Answers whose engine did not say how many tokens they took.", "model"
        )
        self.denied = tally("denied", "Requests refused for a missing or wrong token, or for its role.", "code")
        self.limited = tally("rate_limited", "Requests refused because a token used up a limit.", "token", "limit")
        self.loads = spread("load_seconds", "Seconds of loads that succeeded.", _LOAD_SECONDS, "model")
        self.failed_loads = tally("load_failures", "Loads that failed.", "model", "code")
        self.violations = tally(
            "bus_violations", "Bus messages and subscriptions refused for lack of permission.", "kind"
        )
        self.reconnects = tally("bus_reconnects", "Connections to the bus that were made after the first one.")
        self.staged = tally("staged_bytes", "Bytes of model files sent to LocalAI's workers.", "node")
        self.unqueued = tally(
            "queue_refusals", "Requests refused because a queue was full or they waited too long.", "model", "reason"
        )
        self.disturbed = tally(
            "prefix_disturbed", "Requests that could not go to the replica that has their prefix.", "model"
        )
        self.reconnects.add((), 0)


class _Gauges:
    """What is set for every scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
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


class Metrics:
    def __init__(
        self,
        statistics: Statistics,
        router: Router,
        violations: Sequence[Mapping[str, int]] = (),
    ) -> None:
        """`violations` are live counts of refused messages by kind, kept by those who refuse them."""
        self._statistics = statistics
        self._router = router
        self._violations = violations
        self.staged: Mapping[str, int] = {}  # bytes sent to nodes, counted by who sends them
        self.registry = CollectorRegistry()
        self._counters = _Counters(self.registry)
        self._gauges = _Gauges(self.registry)

    def request_done(self, done: Finished) -> None:
        counters, model, path = self._counters, done.model, done.path
        counters.requests.add((model, done.node, path, done.status))
        counters.seconds.add((model, path), done.seconds)
        if done.first_byte_seconds is not None:
            counters.first_byte.add((model, path), done.first_byte_seconds)
        if done.node and done.status < 400:
            self._count_tokens(done)

    def _count_tokens(self, done: Finished) -> None:
        counters, model, used, first = self._counters, done.model, done.used, done.first_token_seconds
        if used is None or used.is_estimated:
            counters.unreported.add((model,))
        else:
            counters.tokens.add((model, "prompt"), used.prompt_tokens)
            counters.tokens.add((model, "completion"), used.completion_tokens)
        if first is not None:
            counters.first_token.add((model,), first)
            if used is not None and used.completion_tokens >= _LEAST_TOKENS and done.seconds > first:
                counters.speed.add((model,), (used.completion_tokens - 1) / (done.seconds - first))

    def denied(self, code: str) -> None:
        self._counters.denied.add((code,))

    def rate_limited(self, token: str, limit: str) -> None:
        self._counters.limited.add((token, limit))

    def load_ended(self, model: str, seconds: float, code: str) -> None:
        if code:
            self._counters.failed_loads.add((model, code))
        else:
            self._counters.loads.add((model,), seconds)

    def bus_reconnected(self) -> None:
        self._counters.reconnects.add(())

    async def render(self) -> bytes:
        self._gauges.set_cluster(await self._statistics.counts())
        self._gauges.set_routes(self._router)
        self._add_kept_counts()
        return generate_latest(self.registry)

    def _add_kept_counts(self) -> None:
        """Take over what is counted by those who do it."""
        counters, router = self._counters, self._router
        refused = {kind: count for counts in self._violations for kind, count in counts.items()}
        for kind, count in {**dict.fromkeys(_VIOLATIONS, 0), **refused}.items():
            counters.violations.set((kind,), count)
        for node, count in self.staged.items():
            counters.staged.set((node,), count)
        for labels, count in router.queues.refused.items():
            counters.unqueued.set(labels, count)
        for model, count in router.prefixes.disturbances.items():
            counters.disturbed.set((model,), count)
