"""Engines for tests of serving: a launcher that speaks OpenAI's HTTP, says who it is, and takes its time when asked to;
and clients that go on asking and keep what they were told.

    serving.offer(name, "one"); serving.add_model("speaker", name); serving.load("speaker", "worker-1")
    with asking(fleet.frontends, "speaker") as load: ...
    assert load.failures == []
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import psutil
from tests.e2e.conftest import wait_for
from tests.fetch.images import Image
from tests.fleet.cluster import Fleet
from tests.fleet.warehouse import Warehouse

from enginehouse.core.model import Model, ModelFile, ModelOptions
from enginehouse.fetch.galleries.sources import load_builtin

PIECE_SECONDS = 0.1  # between two pieces of a stream
PER_SECOND = 20.0  # requests that a load has at least
RATE = 1.2 * PER_SECOND  # what it tries for, so that a slow moment does not make it less
_PROGRAM = """#!%(python)s
import http.server, json, os, signal, subprocess, sys, time
if %(stubborn)r:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # What it starts is as deaf as it is.
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
%(first)s
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def end_headers(self):
        if %(single)r: self.send_header("connection", "close")
        super().end_headers()
    def tell(self, body):
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    def do_GET(self):
        self.tell({"status": "ok"})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said = "%(says)s %%d" %% os.getpid()
        if not asked.get("stream"):
            time.sleep(%(answer)r)
            return self.tell({"object": "chat.completion", "model": asked["model"], "choices": [
                {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}]})
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for number in range(asked.get("max_tokens", 4)):
            piece = {"object": "chat.completion.chunk", "model": asked["model"], "choices": [
                {"index": 0, "delta": {"content": said}}]}
            self.piece(b"data: " + json.dumps(piece).encode() + b"\\n\\n")
            time.sleep(%(pause)r)
        self.piece(b"data: [DONE]\\n\\n")
        self.piece(b"")
    def piece(self, content):
        self.wfile.write(b"%%x\\r\\n%%s\\r\\n" %% (len(content), content))
        self.wfile.flush()
host, _, port = sys.argv[2].rpartition(":")
class Server(http.server.HTTPServer if %(single)r else http.server.ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128
time.sleep(%(start)r)
try:
    server = Server((host, int(port)), Handler)
except OSError as error:
    # As every launcher says it: workers of one machine may choose the same port at the same moment.
    print(error)
    sys.exit(98)
server.serve_forever()
"""


def program(
    says: str,
    *,
    is_stubborn: bool = False,
    is_single: bool = False,
    start_seconds: float = 0.0,
    answer_seconds: float = 0.0,
    piece_seconds: float = PIECE_SECONDS,
    first: str = "",
) -> bytes:
    """With its first line, so that it can be run. It answers nobody before `start_seconds` are over. One that is single
    has one thread: it is deaf to everybody while it answers. `first` is code that runs before all else.
    """
    filled = _PROGRAM % {
        "python": sys.executable,
        "says": says,
        "stubborn": is_stubborn,
        "single": is_single,
        "first": first,
        "pause": piece_seconds,
        "start": start_seconds,
        "answer": answer_seconds,
    }
    return filled.encode()


class Serving:
    """What a fleet serves in one test; gone after it."""

    def __init__(self, fleet: Fleet, warehouse: Warehouse) -> None:
        self._fleet = fleet
        self._warehouse = warehouse
        self._models: list[str] = []

    def offer(self, name: str, says: str, *, is_stubborn: bool = False, start_seconds: float = 0.0) -> Image:
        run = program(says, is_stubborn=is_stubborn, start_seconds=start_seconds)
        return self._warehouse.publish(name, says, run=run)

    def add_model(
        self,
        model: str,
        backend: str,
        *,
        parallel: int = 0,
        memory: str = "",
        files: tuple[ModelFile, ...] = (),
    ) -> None:
        """Served by that backend, with these files or those of the built-in toy."""
        builtin = next(one for one in load_builtin().models if one.name == "tiny-chat")
        made = Model(
            name=model,
            backend=backend,
            files=files or builtin.files,
            options=ModelOptions(parallel=parallel),
            config={"memory": memory} if memory else {},
        )
        definition = msgspec.json.encode(made).decode()
        self._fleet.rows("insert into models (name, definition, created_at) values (%s, %s, 0)", model, definition)
        self._models.append(model)

    def load(self, model: str, worker: str) -> None:
        found = self._fleet.first.post(f"/api/models/{model}/load", {"node": worker})
        if not found.get("ready"):
            ended = self._fleet.ended(found)
            assert ended["status"] == "succeeded", ended
        if model not in self._models:
            self._models.append(model)
        for frontend in self._fleet.frontends:
            wait_for(f"{frontend.name} to answer", partial(_answers, frontend.port, self.token, model))

    @property
    def token(self) -> str:
        return self._fleet.tokens["admin"]

    def delete_model(self, model: str) -> dict[str, Any]:
        self._models.remove(model)
        made: dict[str, Any] = self._fleet.first.delete(f"/api/models/{model}")
        return made

    def end(self) -> None:
        """Engines are few on one machine: the next test needs their places."""
        removals = [self._fleet.first.delete(f"/api/models/{model}") for model in self._models]
        self._models.clear()
        for removal in removals:
            self._fleet.ended(removal)


def ports(fleet: Fleet) -> list[int]:
    return [frontend.port for frontend in fleet.frontends]


def processes_of(fleet: Fleet, worker: str) -> list[psutil.Process]:
    """The engines of a worker and what they started."""
    return psutil.Process(fleet.workers[worker].pid).children(recursive=True)


def ask(port: int, token: str, model: str, limit_seconds: float = 30.0, text: str = "Who are you?") -> tuple[int, str]:
    """Status, and what was said or the code of the error; 0 where the connection broke."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit_seconds)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        told: dict[str, Any] = json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        return 0, repr(error)
    finally:
        connection.close()
    if answer.status != 200:
        return answer.status, str(told["error"]["code"])
    return 200, str(told["choices"][0]["message"]["content"])


def _answers(port: int, token: str, model: str) -> bool:
    return ask(port, token, model)[0] == 200


class Load:
    """Clients that ask one thing after another; each keeps its place in time."""

    def __init__(self, ports: Sequence[int], token: str, models: Sequence[str], clients: int, rate: float) -> None:
        self.answers: list[tuple[int, str]] = []
        self.slowest = 0.0
        self.seconds: list[float] = []  # of each answer
        self._began = time.monotonic()
        self._over = threading.Event()
        self._pause_seconds = clients / rate
        self._threads = [
            threading.Thread(target=self._go_on, args=(number, ports, token, models)) for number in range(clients)
        ]

    @property
    def failures(self) -> list[tuple[int, str]]:
        return [one for one in self.answers if one[0] != 200]

    def percentile(self, share: float, since: int = 0) -> float:
        """The time within which this share of the answers came, from the one with number `since` on."""
        ordered = sorted(self.seconds[since:])
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))]

    @property
    def per_second(self) -> float:
        """Answers so far, good and bad."""
        return len(self.answers) / (time.monotonic() - self._began)

    def start(self) -> None:
        self._began = time.monotonic()
        for thread in self._threads:
            thread.start()
        self.until_more(len(self._threads))

    def until_more(self, count: int = 10) -> None:
        """Until so many more answers have come, good or bad."""
        wanted = len(self.answers) + count
        wait_for("more answers", lambda: len(self.answers) >= wanted, 60)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive(), "a request hangs"

    def _go_on(self, number: int, ports: Sequence[int], token: str, models: Sequence[str]) -> None:
        turn = number
        while not self._over.is_set():
            turn += 1
            began = time.monotonic()
            # Each asks something new: what begins alike would stay with one replica.
            model, text = models[(turn // len(ports)) % len(models)], f"{number} asks for the {turn}th time"
            self.answers.append(ask(ports[turn % len(ports)], token, model, text=text))
            taken = time.monotonic() - began
            self.slowest = max(self.slowest, taken)
            self.seconds.append(taken)
            self._over.wait(max(0.0, self._pause_seconds - taken))


@contextmanager
def asking(ports: Sequence[int], token: str, *models: str, clients: int = 8, rate: float = RATE) -> Iterator[Load]:
    load = Load(ports, token, models, clients, rate)
    load.start()
    try:
        yield load
    finally:
        load.end()


class Stream:
    """One streamed answer in a thread of its own."""

    def __init__(self, port: int, token: str, model: str, pieces: int) -> None:
        self.pieces: list[str] = []
        self.is_whole = False
        self._port = port
        self._token = token
        self._body = {"model": model, "messages": [{"role": "user", "content": "Go on"}], "max_tokens": pieces}
        self._thread = threading.Thread(target=self._read)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "a stream hangs"

    def _read(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        headers = {"authorization": f"Bearer {self._token}"}
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps({**self._body, "stream": True}), headers)
            for line in connection.getresponse():
                if line.startswith(b"data: [DONE]"):
                    self.is_whole = True
                elif line.startswith(b"data: {"):
                    self.pieces.append(json.loads(line[6:])["choices"][0]["delta"]["content"])
        except (OSError, http.client.HTTPException, KeyError):
            return
        finally:
            connection.close()
