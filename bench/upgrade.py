"""An engine is upgraded while 50 requests a second come: failed requests, and the longest time without an answer.

A real cluster: two frontends, two workers, NATS, PostgreSQL, a registry. Each of four upgrades replaces the version
that serves: one replica or two, a small image or a large one, none of which is on the node yet. The longest time
between two answers is set against the time that an engine takes to start: with a new replica beside the old one it
depends neither on the start nor on the size of the image. The bars: no failed request, and no gap as long as half a
start.

    .venv/bin/python bench/upgrade.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.serving.fleets import add_model, cluster, publish
from tests.e2e.conftest import wait_for
from tests.fleet.cluster import Fleet

BAR = 0.5
RATE = 50.0
CLIENTS = 10
LIMIT_SECONDS = 120.0


class Clients:
    """Requests at a steady rate, each on a kept connection; when each answer came, and what failed."""

    def __init__(self, fleet: Fleet, model: str) -> None:
        self.answered: list[float] = []
        self.failures: list[str] = []
        self._over = threading.Event()
        self._body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
        self._headers = {"authorization": f"Bearer {fleet.tokens['admin']}", "content-type": "application/json"}
        ports = [frontend.port for frontend in fleet.frontends]
        self._threads = [
            threading.Thread(target=self._go_on, args=(ports[number % len(ports)], number)) for number in range(CLIENTS)
        ]

    @contextmanager
    def asking(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        wait_for("the first answers", lambda: len(self.answered) > CLIENTS, LIMIT_SECONDS)
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join(LIMIT_SECONDS)

    @property
    def longest_gap_seconds(self) -> float:
        times = sorted(self.answered)
        return max(after - before for before, after in pairwise(times))

    def _go_on(self, port: int, number: int) -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=LIMIT_SECONDS)
        due = time.monotonic() + number / RATE
        while not self._over.wait(max(0.0, due - time.monotonic())):
            due = max(due + CLIENTS / RATE, time.monotonic())
            try:
                connection.request("POST", "/v1/chat/completions", self._body, self._headers)
                answer = connection.getresponse()
                said = answer.read()
            except (OSError, HTTPException) as error:
                self.failures.append(repr(error))
                connection.close()
                continue
            if answer.status == 200:
                self.answered.append(time.monotonic())
            else:
                self.failures.append(f"{answer.status} {said[:200]!r}")


def measure(fleet: Fleet, name: str, nodes: list[str]) -> tuple[int, float, float]:
    """Failed requests, the longest gap, and how long the whole upgrade took."""
    model = f"of-{name}"
    before = {pid for node in nodes for pid in nonces(fleet, node, model)}
    clients = Clients(fleet, model)
    with clients.asking():
        began = time.monotonic()
        fleet.done("upgrade", name, nodes)

        def is_replaced() -> bool:
            now = [nonces(fleet, node, model) for node in nodes]
            return all(len(each) == 1 and not each & before for each in now)

        wait_for("the replicas to be replaced", is_replaced, LIMIT_SECONDS)
        took = time.monotonic() - began
    for failure in clients.failures[:3]:
        print(f"failed: {failure}")
    return len(clients.failures), clients.longest_gap_seconds, took


def nonces(fleet: Fleet, node: str, model: str) -> set[str]:
    return {one["nonce"] for one in fleet.node(node)["replicas"] if one["model_id"] == model}


def main() -> int:
    parser = argparse.ArgumentParser(description="Failed requests and the longest gap during an engine upgrade.")
    parser.add_argument("--quick", action="store_true", help="a large image of 32 MB instead of 1 GiB, under 50 s")
    is_quick = parser.parse_args().quick
    large, start_seconds = (32, 1.0) if is_quick else (1074, 2.0)
    worst, failed = 0.0, 0
    with cluster(("small", "large"), workers=2) as (fleet, warehouse):
        for name, megabytes in (("small", 1), ("large", large)):
            publish(warehouse, name, "0", start_seconds=start_seconds, megabytes=megabytes)
            add_model(fleet, f"of-{name}", name)
            for count in (1, 2):
                nodes = [f"worker-{number}" for number in range(1, count + 1)]
                for node in nodes:
                    found = fleet.first.post(f"/api/models/of-{name}/load", {"node": node})
                    if not found.get("ready"):
                        fleet.ended(found, limit_seconds=LIMIT_SECONDS)
                publish(warehouse, name, str(count), start_seconds=start_seconds, megabytes=megabytes)
                failures, gap, took = measure(fleet, name, nodes)
                print(
                    f"{megabytes:5} MB, {count} replica{'s'[: count - 1]}: {failures} failed, "
                    f"longest gap {gap:.3f} s, upgraded and replaced after {took:.1f} s"
                )
                worst, failed = max(worst, gap), failed + failures
    ratio = worst / start_seconds
    print(f"upgrade: {ratio:.2f}, {failed} failed (bar {BAR}, 0 failed: longest gap over the start of an engine)")
    return 0 if ratio <= BAR and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
