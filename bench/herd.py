"""A thousand requests for a cold model within a second, on two frontends: one install, one start, one load.

A real cluster: two frontends, two workers, NATS, PostgreSQL, a registry. First one request for a cold model is timed on
its own: that is the time of a load. Then a thousand requests come for another cold model of the same size. All of them
must be answered, the last one at most a second after the time of a load, and the workers must have installed and
started once.

    .venv/bin/python bench/herd.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.serving.fleets import add_model, cluster, publish
from tests.fleet.cluster import Fleet

BAR = 1.0
REQUESTS = 1000
WITHIN_SECONDS = 1.0  # in which they come
MORE_SECONDS = 1.0  # than a load, for the last answer
START_SECONDS = 2.0
LIMIT_SECONDS = 60.0


async def ask(port: int, head: bytes, body: bytes) -> int:
    """The status of the answer; 0 if the connection broke."""
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(head + body)
                answer = await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return 0
    return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0


async def herd(fleet: Fleet, model: str, count: int) -> tuple[float, dict[int, int]]:
    """How long it took until the last answer, and how often each status came."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
        f"content-type: application/json\r\nauthorization: Bearer {fleet.tokens['admin']}\r\n\r\n"
    ).encode()
    ports = [frontend.port for frontend in fleet.frontends]
    began = time.perf_counter()

    async def one(number: int) -> int:
        await asyncio.sleep(WITHIN_SECONDS * number / count)
        return await ask(ports[number % len(ports)], head, body)

    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(one(number)) for number in range(count)]
    took = time.perf_counter() - began
    statuses = [task.result() for task in asked]
    return took, {status: statuses.count(status) for status in sorted(set(statuses))}


def begun(fleet: Fleet, action: str) -> int:
    return sum(fleet.began(worker, action) for worker in fleet.workers)


def main() -> int:
    parser = argparse.ArgumentParser(description="A thousand requests for a cold model at once.")
    parser.add_argument("--quick", action="store_true", help="one herd instead of three, under 50 s")
    rounds = 1 if parser.parse_args().quick else 3
    names = tuple(f"engine-{number}" for number in range(2 * rounds))
    ratios, is_right = [], True
    with cluster(names, workers=2) as (fleet, warehouse):
        for number in range(rounds):
            alone, many = names[2 * number], names[2 * number + 1]
            for name in (alone, many):
                publish(warehouse, name, "1", start_seconds=START_SECONDS, megabytes=20)
                add_model(fleet, f"of-{name}", name)
            load_seconds, statuses = asyncio.run(herd(fleet, f"of-{alone}", 1))
            is_right &= statuses == {200: 1}
            took, statuses = asyncio.run(herd(fleet, f"of-{many}", REQUESTS))
            installs, starts = begun(fleet, f"install {many}"), begun(fleet, f"start of-{many}")
            is_right &= statuses == {200: REQUESTS} and (installs, starts) == (1, 1)
            ratios.append(took / (load_seconds + MORE_SECONDS))
            print(
                f"one request: {load_seconds:.2f} s; {REQUESTS} requests: {took:.2f} s, statuses {statuses}, "
                f"{installs} install, {starts} start"
            )
    ratio = max(ratios)
    print(f"herd: {ratio:.2f} (bar {BAR}: last of {REQUESTS} answers over a load and a second; all 200, one load)")
    return 0 if is_right and ratio <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
