"""Images whose engines speak LocalAI's protocol, in a fleet: installed, loaded and asked without anybody saying what
they speak; upgraded and deleted while they stream.
"""

from __future__ import annotations

import http.client
import json
import os
import threading

import msgspec
from tests.e2e.conftest import wait_for
from tests.engine.localai.stub_backend import SENTENCE, in_one_file
from tests.fleet.cluster import Fleet
from tests.fleet.engines import Serving, ask, ports
from tests.fleet.warehouse import Warehouse

from enginehouse.core.model import Model
from enginehouse.fetch.galleries.sources import load_builtin

IS_PROOF = os.environ.get("ENGINEHOUSE_PROOF") == "1"
TOKENS = 100_000 if IS_PROOF else 300  # longer than an engine is waited for, or six seconds
STREAMS = 5
SAYS = "".join(SENTENCE)


class Reader:
    """One streamed answer in a thread of its own."""

    def __init__(self, port: int, token: str, model: str) -> None:
        self.events: list[dict[str, object]] = []
        self.is_whole = False
        self._port, self._token, self._model = port, token, model
        self._thread = threading.Thread(target=self._read)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "a stream hangs"

    @property
    def has_failed_plainly(self) -> bool:
        return bool(self.events) and "error" in self.events[-1]

    def _read(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        body = {"model": self._model, "messages": [{"role": "user", "content": "Go on"}], "stream": True}
        try:
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(body), {"authorization": f"Bearer {self._token}"}
            )
            for line in connection.getresponse():
                if line.startswith(b"data: [DONE]"):
                    self.is_whole = True
                elif line.startswith(b"data: {"):
                    self.events.append(json.loads(line[6:]))
        finally:
            connection.close()


def add_model(fleet: Fleet, serving: Serving, model: str, backend: str, *options: str) -> None:
    """Served by that backend, with the files of the built-in toy."""
    builtin = next(one for one in load_builtin().models if one.name == "tiny-chat")
    config = {"options": [f"stub.{one}" for one in options]}
    made = Model(name=model, backend=backend, files=builtin.files, config=config)
    definition = msgspec.json.encode(made).decode()
    fleet.rows("insert into models (name, definition, created_at) values (%s, %s, 0)", model, definition)
    serving.load(model, "worker-1")


def test_an_image_of_localai_s_protocol_serves_though_nobody_said_what_it_speaks(
    fleet: Fleet, warehouse: Warehouse, serving: Serving, name: str
) -> None:
    warehouse.publish(name, "", run=in_one_file())
    add_model(fleet, serving, "grpc-speaker", name)
    for port in ports(fleet):
        assert ask(port, serving.token, "grpc-speaker") == (200, SAYS)
    ((protocol,),) = fleet.rows("select protocol from replicas where model = %s", "grpc-speaker")
    assert protocol == "localai-grpc"


def test_an_upgrade_under_streams_ends_none_of_them_as_if_complete(
    fleet: Fleet, warehouse: Warehouse, serving: Serving, name: str
) -> None:
    """F-021. The old process goes on until its streams have ended, or for 30 s."""
    warehouse.publish(name, "", run=in_one_file())
    add_model(fleet, serving, "long-speaker", name, f"tokens:{TOKENS}", "token_seconds:0.02")
    readers = [Reader(port, serving.token, "long-speaker") for port in (ports(fleet) * STREAMS)[:STREAMS]]
    for reader in readers:
        reader.start()
    wait_for("all streams to be under way", lambda: all(len(reader.events) > 3 for reader in readers))
    warehouse.publish(name, "", run=in_one_file() + b"# newer\n")
    ended = fleet.ended(fleet.request("upgrade", name, ["worker-1"]))
    assert ended["status"] == "succeeded"
    for reader in readers:
        reader.join()
        assert reader.is_whole is not IS_PROOF
        assert reader.has_failed_plainly is IS_PROOF, reader.events[-1:]
    replaced = "select count(*) from operations where kind = 'load' and name = %s and replaces != 'null'"
    wait_for("the replacement", lambda: fleet.rows(replaced, "long-speaker") == [(1,)])
