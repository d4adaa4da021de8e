"""Statistics for Prometheus: requests, tokens, waits, loads, replicas, nodes and their resources, refusals.

Counters are incremented where events happen. Gauges are set from the database and the router for every scrape, so they
cannot drift. A label never has a value that a client can invent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from enginehouse.api.openai import Finished
from enginehouse.api.tallies import Distribution, Tally
from enginehouse.frontend.serving.router import Router
from enginehouse.frontend.watching.statistics import Statistics

if TYPE_CHECKING:
    from enginehouse.api.gauges import Gauges

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_LOAD_SECONDS = (0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_SPEEDS = (1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 200, 400, 800)  # tokens per second
_LEAST_TOKENS = 2  # of an answer whose speed is measured: between the first and the last of them
_VIOLATIONS = ("publish", "subscription", "reply", "progress", "address")


class _Counters:
    """What is counted where it happens. What every request counts are tallies, which cost less."""

    def __init__(self) -> None:
        self.families: list[Tally | Distribution] = []

        def tally(name: str, text: str, *labels: str) -> Tally:
            self.families.append(made := Tally(f"enginehouse_{name}", text, *labels))
            return made

        def spread(name: str, text: str, bounds: Sequence[float], *labels: str) -> Distribution:
            self.families.append(made := Distribution(f"enginehouse_{name}", text, bounds, labels))
            return made

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
        self._counters = _Counters()
        self._gauges: Gauges | None = None

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
        counts = await self._statistics.counts()
        if self._gauges is None:
            # With the first scrape, because a start needs no library of metrics.
            from enginehouse.api.gauges import Gauges

            self._gauges = Gauges(self._counters.families)
        self._gauges.set_cluster(counts)
        self._gauges.set_routes(self._router)
        self._add_kept_counts()
        return self._gauges.render()

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
