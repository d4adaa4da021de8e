"""Requests for models that are not loaded: asked all at once, with everything that each was told; and what the fleet
did for them, by its logs and rows.

    answers = ask_at_once(serving.token, [(port, "model") for port in ports(fleet)] * 50)
    assert begun(fleet, "start model") == 1
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from msgspec import Struct
from tests.fleet.cluster import Fleet
from tests.fleet.test_wanted import schedule

LIMIT_SECONDS = 90.0  # longer than a frontend lets a request wait


class ColdAnswer(Struct, frozen=True, kw_only=True):
    model: str
    status: int  # 0 where the connection broke or nobody answered in time
    said: str = ""
    error: dict[str, Any] = {}
    retry_after: str = ""
    seconds: float = 0.0

    @property
    def code(self) -> str:
        return str(self.error.get("code", ""))

    @property
    def message(self) -> str:
        return str(self.error.get("message", ""))


def ask_cold(port: int, token: str, model: str, limit_seconds: float = LIMIT_SECONDS) -> ColdAnswer:
    body = {"model": model, "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8}
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit_seconds)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        told: dict[str, Any] = json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError):
        return ColdAnswer(model=model, status=0, seconds=time.monotonic() - began)
    finally:
        connection.close()
    seconds = time.monotonic() - began
    if answer.status == 200:
        said = str(told["choices"][0]["message"]["content"])
        return ColdAnswer(model=model, status=200, said=said, seconds=seconds)
    later = answer.getheader("retry-after") or ""
    return ColdAnswer(model=model, status=answer.status, error=told["error"], retry_after=later, seconds=seconds)


def ask_at_once(token: str, asked: Iterable[tuple[int, str]]) -> list[ColdAnswer]:
    """Ask for each of these models at that port, in a thread each."""
    every = list(asked)
    with ThreadPoolExecutor(len(every)) as pool:
        return list(pool.map(lambda one: ask_cold(one[0], token, one[1]), every))


def begun(fleet: Fleet, action: str) -> int:
    """How often the workers have begun to do this, all together."""
    return sum(fleet.began(worker, action) for worker in fleet.workers)


def loads_of(fleet: Fleet, model: str) -> int:
    ((found,),) = fleet.rows("select count(*) from operations where kind = 'load' and name = %s", model)
    return int(found)


def nonces_of(fleet: Fleet, model: str) -> list[str]:
    return [nonce for (nonce,) in fleet.rows("select nonce from replicas where model = %s", model)]


@contextmanager
def only_on(fleet: Fleet, model: str, worker: str, **more: object) -> Iterator[None]:
    """The model may run on that worker and nowhere else."""
    schedule(fleet, model, node_selector={"node.name": worker}, **more)
    try:
        yield
    finally:
        fleet.mend()
        fleet.first.delete(f"/api/nodes/scheduling/{model}")
