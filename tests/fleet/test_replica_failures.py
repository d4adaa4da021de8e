"""Replicas under load that fail, are full, or have seen a conversation: who is asked, and what clients are told."""

from __future__ import annotations

import http.server
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import psutil
from tests.e2e.conftest import wait_for
from tests.fleet.cluster import Fleet
from tests.fleet.engines import Serving, Stream, ask, asking, ports, processes_of
from tests.fleet.test_serving import reported

IS_PROOF = bool(os.environ.get("ENGINEHOUSE_PROOF"))
RATE = 50.0  # requests a second, of F-056
CLIENTS = 16
STALE_REQUESTS = 10_000 if IS_PROOF else 300  # of F-057


def test_a_replica_that_is_killed_under_load_costs_only_what_it_was_answering(
    fleet: Fleet, serving: Serving, name: str
) -> None:
    """F-056."""
    serving.offer(name, "one")
    serving.add_model("speaker", name)
    for worker in ("worker-1", "worker-2"):
        serving.load("speaker", worker)
    pids = {worker: [one.pid for one in processes_of(fleet, worker)] for worker in ("worker-1", "worker-2")}
    ((dying,), (staying,)) = pids["worker-1"], pids["worker-2"]
    of_node = "select nonce from replicas r join nodes n on n.id = r.node_id where n.name = 'worker-1'"
    ((nonce,),) = fleet.rows(of_node)
    with asking(ports(fleet), serving.token, "speaker", clients=CLIENTS, rate=RATE) as load:
        wait_for("both to answer", lambda: {f"one {dying}", f"one {staying}"} <= {said for _, said in load.answers})
        load.until_more(50)
        assert load.failures == []
        os.kill(dying, signal.SIGKILL)
        killed, before = time.monotonic(), len(load.answers)
        wait_for("its row to be gone", lambda: (nonce,) not in fleet.rows(of_node), 2.0)
        assert time.monotonic() - killed < 2.0
        # What was sent to it was answered or has failed by now: an engine that is gone closes its connections.
        load.until_more(CLIENTS)
        after = len(load.answers)
        wait_for("it to serve again", lambda: _others(load.answers[after:], staying, dying), 20.0)
        load.until_more(20)
    assert len(load.failures) <= CLIENTS, load.failures
    assert {status for status, _ in load.failures} <= {502}, load.failures
    assert [one for one in load.answers[after:] if one[0] != 200] == []
    assert not [said for _, said in load.answers[before + CLIENTS :] if said == f"one {dying}"]


def _others(answers: list[tuple[int, str]], *pids: int) -> set[str]:
    """What was said by other processes than these: by the one that took the place of the first."""
    return {said for status, said in answers if status == 200} - {f"one {pid}" for pid in pids}


@contextmanager
def impostor(address: str) -> Iterator[list[str]]:
    """A process at the address of another one that answers whoever asks; the paths it was asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers["content-length"]))
            said = {"role": "assistant", "content": "impostor"}
            body = json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "message": said}]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    host, _, port = address.rpartition(":")
    server = http.server.ThreadingHTTPServer((host, int(port)), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield asked
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def test_a_route_that_leads_to_another_process_by_now_is_not_used(fleet: Fleet, serving: Serving, name: str) -> None:
    """F-057. The engine does not check its key, and the other process answers whoever asks: the hardest case. A worker
    gives no port to another model so soon, so the other process is none of its engines.
    """
    serving.offer(name, "old")
    serving.add_model("old-speaker", name)
    serving.load("old-speaker", "worker-1")
    replica = wait_for("its worker to report it", partial(reported, fleet, "worker-1", "old-speaker"))
    assert replica["checks_key"] is False
    assert ask(fleet.second.port, serving.token, "old-speaker")[0] == 200, "it has the route, and a proof for a moment"
    (engine,) = [one.pid for one in processes_of(fleet, "worker-1")]
    fleet.second.pause()
    try:
        paused = time.monotonic()
        fleet.workers["worker-1"].kill()
        wait_for("its engine to end with it", lambda: not psutil.pid_exists(engine))
        wait_for("the proof to be old", lambda: time.monotonic() - paused > 1.2)
        with impostor(replica["address"]) as asked:
            fleet.second.resume()
            with ThreadPoolExecutor(16) as pool:
                answers = list(
                    pool.map(
                        lambda number: ask(fleet.second.port, serving.token, "old-speaker", text=f"{number}"),
                        range(STALE_REQUESTS),
                    )
                )
    finally:
        fleet.second.resume()
    assert asked == []
    assert {said.partition(" ")[0] for status, said in answers if status == 200} <= {"old"}
    assert {status for status, _ in answers} <= {200, 503}, answers


def test_a_conversation_stays_with_its_replica_whichever_frontend_is_asked(
    fleet: Fleet, serving: Serving, name: str
) -> None:
    serving.offer(name, "one")
    serving.add_model("listener", name)
    for worker in ("worker-4", "worker-5"):
        serving.load("listener", worker)

    def said(topic: str, turns: int, port: int) -> str:
        text = "".join(f"{topic} {turn} " * 60 for turn in range(turns))
        status, answer = ask(port, serving.token, "listener", text=text)
        assert status == 200, answer
        return answer

    def said_of(topics: list[str], turns: int, port: int) -> dict[str, str]:
        return {topic: said(topic, turns, port) for topic in topics}

    topics = [f"topic {number}" for number in range(12)]
    at = said_of(topics, 3, fleet.first.port)
    assert len(set(at.values())) == 2, "both replicas have conversations"
    for turns in range(4, 7):
        assert said_of(topics, turns, fleet.first.port) == at
    # The frontends tell each other once a second; by chance they agree once in thousands of times.
    told = time.monotonic() + 2.5
    wait_for("the other frontend to be told", lambda: time.monotonic() > told)
    assert said_of(topics, 7, fleet.second.port) == at


def test_a_full_replica_lets_requests_wait_their_turn(fleet: Fleet, serving: Serving, name: str) -> None:
    serving.offer(name, "one")
    serving.add_model("narrow", name, parallel=2)
    serving.load("narrow", "worker-3")
    streams = [Stream(fleet.first.port, serving.token, "narrow", 8) for _ in range(8)]
    most = 0
    for stream in streams:
        stream.start()
    queued = 'enginehouse_model_queued{model="narrow"} 6.0'
    wait_for("six to wait", lambda: queued in fleet.first.client.request_bytes("GET", "/metrics").decode())

    def all_whole() -> bool:
        nonlocal most
        most = max(most, sum(bool(stream.pieces) and not stream.is_whole for stream in streams))
        return all(stream.is_whole for stream in streams)

    wait_for("all to be answered", all_whole)
    for stream in streams:
        stream.join()
        assert len(stream.pieces) == 8
    assert most == 2
