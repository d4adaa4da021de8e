"""This version with the one before: what real programs of it sent and answered, recorded, against ours.

A fleet is upgraded one program at a time, the server first, so a frontend hears earlier workers for days, and a worker
that was upgraded too soon an earlier frontend. `earlier_worker.jsonl` is a worker of 0.1 as of schema 0018 that
registers, reports, loads a model and leaves; `earlier_frontend.jsonl` what its frontend answers a worker of ours.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nacl.signing import SigningKey
from tests.api.whole_frontend import Site, site
from tests.worker.whole_worker import WholeWorker
from tests.worker.world import until

from enginehouse.core.node_api import RegisterRequest
from enginehouse.link.client import FrontendClient
from enginehouse.link.worker import WorkerLink
from enginehouse.worker.identity import Identity

HERE = Path(__file__).parent


def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / name).read_text().splitlines()]


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as made:
        yield made


async def test_a_frontend_understands_all_that_an_earlier_worker_sends(here: Site) -> None:
    registration, *said = recorded("earlier_worker.jsonl")
    join, admin = here.tokens["join"], here.tokens["admin"]
    node: dict[str, Any] = {}
    for _ in range(2):  # it asks again until it is approved
        challenge = (await here.ask("POST", "/api/node/challenge", token=join)).json["challenge"]
        # A signature is over a challenge of this cluster, so only these two fields are new.
        asked = msgspec.convert({**registration["body"], "challenge": challenge}, RegisterRequest)
        signed = Identity(SigningKey(b"1" * 32)).signed(asked)
        fresh = {"challenge": challenge, "public_key": signed.public_key, "signature": signed.signature}
        answer = await here.ask("POST", "/api/node/register", {**registration["body"], **fresh}, token=join)
        assert answer.status == registration["status"]
        node = answer.json
        await here.ask("POST", f"/api/nodes/{node['id']}/approve", token=admin)
    # Every field that it was given before is there, with a value of the same kind.
    for field, value in registration["answer"].items():
        if not field.startswith("nats"):  # those of a real bus, which is not here
            assert type(node[field]) is type(value), field
    for one in said:
        path = one["path"].replace("{id}", node["id"])
        answer = await here.ask(one["method"], path, one["body"], token=node["node_token"])
        assert answer.status == one["status"], (one["path"], answer.body)
        assert set(one["answer"]) <= set(answer.json), one["path"]
        if one["path"].endswith("heartbeat"):
            shown = (await here.ask("GET", f"/api/nodes/{node['id']}", token=admin)).json
            assert shown["health"] in ("healthy", "unhealthy")
    last = next(one["body"] for one in reversed(said) if (one["body"] or {}).get("report"))
    shown = (await here.ask("GET", f"/api/nodes/{node['id']}", token=admin)).json
    assert shown["worker_version"] == last["report"]["version"]
    assert [one["name"] for one in shown["backends"]] == [one["name"] for one in last["report"]["backends"]]
    assert shown["health"] == "offline", "it has left"


@contextmanager
def earlier_frontend() -> Iterator[tuple[str, list[str]]]:
    """A server that answers as recorded, and refuses whoever has no token; with what it was asked."""
    answers = recorded("earlier_frontend.jsonl")
    pending = [one for one in answers if one["path"].endswith("/register")]
    heard: list[str] = []

    def answer_to(path: str, *, has_token: bool) -> dict[str, Any]:
        kind = path.rsplit("/", 1)[-1]
        heard.append(f"{kind} {'with' if has_token else 'without'} token")
        if not has_token:
            return next(one for one in answers if one["status"] == 401)
        if kind == "register":
            return pending.pop(0) if len(pending) > 1 else pending[0]
        return next(one for one in answers if one["path"].endswith(f"/{kind}") and one["status"] == 200)

    class Played(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            found = answer_to(self.path, has_token=bool(self.headers.get("authorization")))
            content = json.dumps(found["answer"]).encode()
            self.send_response(found["status"])
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            logging.getLogger(__name__).debug(format, *args)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Played)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", heard
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_a_worker_joins_an_earlier_frontend_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginehouse.worker.registration.PENDING_FIRST_SECONDS", 0.05)
    with earlier_frontend() as (url, heard):
        for is_first in (True, False):
            heard.clear()
            worker = WholeWorker(tmp_path)
            worker.agent._link = WorkerLink(FrontendClient(url, "recorded-join-token", user_agent="tests"))
            async with asyncio.TaskGroup() as group:
                task = group.create_task(worker.agent.run())
                await until(lambda: heard.count("heartbeat with token") >= 1)
                worker.agent.stop()
                await task
            # It was accepted before, so it comes by its key; such a frontend wants the token, and gets it at once.
            assert (heard[0] == "challenge with token") is is_first
            assert (heard[:2] == ["challenge without token", "challenge with token"]) is not is_first
            assert "register with token" in heard
            assert "register without token" not in heard
            assert heard[-1] == "deregister with token"
