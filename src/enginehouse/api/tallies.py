"""Counters and histograms for the path of every request: plain numbers, turned into metrics when they are scraped.

The classes of the library take a lock, check labels and look through all buckets one by one, which costs several
microseconds per request. All of this runs on the event loop, so no lock is needed. Values of labels are given as
tuples in the order of the names. The library is imported with the first scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

Labels = tuple[str | int, ...]


class Tally:
    """A family of counters."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._counts: dict[Labels, int] = {}

    def add(self, labels: Labels, count: int = 1) -> None:
        self._counts[labels] = self._counts.get(labels, 0) + count

    def set(self, labels: Labels, count: int) -> None:
        """For what is counted elsewhere; it never decreases there."""
        self._counts[labels] = count

    def family(self) -> Metric:
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric([str(one) for one in labels], count)
        return family


class _Spread:
    """How often values fell between the bounds, and their sum."""

    def __init__(self, size: int) -> None:
        self.counts = [0] * size
        self.sum = 0.0


class Distribution:
    """A family of histograms with the same bounds."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str]) -> None:
        self._name = name
        self._text = text
        self._bounds = list(bounds)
        self._labels = labels
        self._spreads: dict[Labels, _Spread] = {}

    def add(self, labels: Labels, value: float) -> None:
        spread = self._spreads.get(labels)
        if spread is None:
            spread = self._spreads[labels] = _Spread(len(self._bounds) + 1)
        spread.counts[bisect_left(self._bounds, value)] += 1
        spread.sum += value

    def family(self) -> Metric:
        from prometheus_client.core import HistogramMetricFamily

        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for labels, spread in self._spreads.items():
            so_far, buckets = 0, []
            for name, count in zip(names, spread.counts, strict=True):
                so_far += count
                buckets.append((name, float(so_far)))
            family.add_metric([str(one) for one in labels], buckets, spread.sum)
        return family
