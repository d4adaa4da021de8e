"""The frontend's client against real sockets: what the frontend says, and everything that is not a frontend."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from enginehouse.core.errors import (
    Conflict,
    EnginehouseError,
    Invalid,
    Malformed,
    NotFound,
    Unauthenticated,
    Unavailable,
    Upstream,
)
from enginehouse.core.node_api import HeartbeatRequest, RegisterRequest
from enginehouse.link.client import FrontendClient
from enginehouse.link.worker import WorkerLink

Answer = Callable[[socket.socket, bytes], bool]


class Server:
    """A listening socket that answers each request with what the test says; True keeps the connection."""

    def __init__(self, answer: Answer) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            with peer:
                while request := self._read(peer):
                    self.requests.append(request)
                    if not self._answer(peer, request):
                        break

    def _read(self, peer: socket.socket) -> bytes:
        received = b""
        try:
            while b"\r\n\r\n" not in received:
                piece = peer.recv(65536)
                if not piece:
                    return b""
                received += piece
            head, _, body = received.partition(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
            )
            while len(body) < length:
                body += peer.recv(65536)
        except OSError:
            return b""
        return head + b"\r\n\r\n" + body

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)


@contextmanager
def serving(answer: Answer) -> Iterator[tuple[FrontendClient, Server]]:
    server = Server(answer)
    client = FrontendClient(server.url, "secret", user_agent="test/1")
    try:
        yield client, server
    finally:
        client.close()
        server.close()


def plain(status: str, body: bytes, extra: str = "") -> Answer:
    def answer(peer: socket.socket, _: bytes) -> bool:
        peer.sendall(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{extra}\r\n".encode() + body)
        return True

    return answer


def test_an_answer_is_decoded_and_the_connection_is_kept() -> None:
    with serving(plain("200 OK", b'{"a": 1}')) as (client, server):
        assert client.request("GET", "/x", None, dict[str, int]) == {"a": 1}
        assert client.request("POST", "/x", {"b": 2}, dict[str, int]) == {"a": 1}
        assert server.connections == 1
        assert b"Authorization: Bearer secret" in server.requests[0]
        assert server.requests[1].endswith(b'{"b":2}')
        assert client.local_address() == "127.0.0.1"


def test_the_frontends_error_keeps_class_code_and_waiting_time() -> None:
    body = b'{"error":{"message":"cannot do it","code":"model_loading","param":"model"},"loading":{"state":"x"}}'
    with serving(plain("503 Busy", body, "retry-after: 7\r\n")) as (client, _):
        with pytest.raises(Unavailable) as caught:
            client.request_bytes("GET", "/x")
    assert (caught.value.code, caught.value.message, caught.value.param) == ("model_loading", "cannot do it", "model")
    assert caught.value.retry_after_seconds == 7
    assert caught.value.details == {"loading": {"state": "x"}}


@pytest.mark.parametrize(
    ("status", "kind"), [("404 x", NotFound), ("409 x", Conflict), ("422 x", Invalid), ("502 x", Upstream)]
)
def test_every_status_becomes_its_class(status: str, kind: type[EnginehouseError]) -> None:
    with serving(plain(status, b'{"error":{"message":"m","code":"c"}}')) as (client, _):
        with pytest.raises(kind) as caught:
            client.request_bytes("GET", "/x")
    assert type(caught.value) is kind


def test_nothing_listening_is_told_with_what_to_check() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Unavailable) as caught:
        FrontendClient(f"http://127.0.0.1:{port}", "", user_agent="t").request_bytes("GET", "/")
    assert caught.value.code == "frontend_unreachable"
    assert "refused" in caught.value.message
    assert "enginehouse up" in caught.value.message


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{}",
        b"\x15\x03\x01\x00\x02\x02\x50",
    ],
)
def test_a_server_that_does_not_speak_http_is_unreachable(raw: bytes) -> None:
    def answer(peer: socket.socket, _: bytes) -> bool:
        peer.sendall(raw)
        return False

    with serving(answer) as (client, _):
        with pytest.raises(Unavailable) as caught:
            client.request("GET", "/x", None, dict[str, int])
    assert caught.value.code == "frontend_unreachable"


def test_another_web_server_is_not_taken_for_a_frontend() -> None:
    for status in ("200 OK", "404 Not Found"):
        with serving(plain(status, b"<html>hello</html>")) as (client, _):
            with pytest.raises(Unavailable) as caught:
                client.request("GET", "/x", None, dict[str, int])
        assert caught.value.code == "not_understood"


def test_a_silent_server_is_given_up_after_the_limit() -> None:
    done = threading.Event()

    def answer(_peer: socket.socket, _request: bytes) -> bool:
        done.wait(5)
        return False

    with serving(answer) as (client, _):
        with pytest.raises(Unavailable) as caught:
            client.request_bytes("GET", "/x", timeout_seconds=0.05)
        done.set()
    assert "no answer in time" in caught.value.message


def test_a_kept_connection_that_was_closed_is_replaced_for_a_read_and_never_for_a_change() -> None:
    def answer(peer: socket.socket, request: bytes) -> bool:
        plain("200 OK", b"{}")(peer, request)
        return False

    with serving(answer) as (client, server):
        client.request_bytes("GET", "/1")
        client.request_bytes("GET", "/2")
        assert server.connections == 2
        with pytest.raises(Unavailable):
            client.request_bytes("POST", "/3", {})
        assert not any(b"/3" in request for request in server.requests)


@pytest.mark.parametrize("url", ["", "localhost:8080", "ftp://x", "http://", "http://h:port", "http://h:99999"])
def test_an_address_that_cannot_be_one_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(Invalid) as caught:
        FrontendClient(url, "", user_agent="t")
    assert caught.value.code == "invalid_uri"


def chunked(*pieces: bytes, ends: bool = True) -> Answer:
    def answer(peer: socket.socket, _: bytes) -> bool:
        peer.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in pieces:
            peer.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
        if ends:
            peer.sendall(b"0\r\n\r\n")
        return False

    return answer


def test_events_arrive_and_the_frontends_end_ends_the_iteration() -> None:
    with serving(chunked(b": hello\n\nid: 1\nevent: no", b"de\ndata: {}\n\ndata: [DONE]\n\n")) as (client, _):
        events = list(client.stream_events("/api/events"))
    assert [(event.id, event.event, event.data) for event in events] == [
        ("1", "node", b"{}"),
        ("1", "message", b"[DONE]"),
    ]


def test_a_stream_that_breaks_is_an_error_and_not_an_end() -> None:
    with serving(chunked(b"data: 1\n\n", ends=False)) as (client, _):
        stream = client.post_stream("/v1/chat/completions", {"stream": True})
        assert next(stream).data == b"1"
        with pytest.raises(Unavailable):
            next(stream)


def test_a_silent_stream_is_noticed() -> None:
    done = threading.Event()

    def answer(peer: socket.socket, request: bytes) -> bool:
        chunked(b"data: 1\n\n", ends=False)(peer, request)
        done.wait(5)
        return False

    with serving(answer) as (client, _):
        stream = client.stream_events("/api/events", silence_seconds=0.05)
        assert next(stream).data == b"1"
        with pytest.raises(Unavailable) as caught:
            next(stream)
        done.set()
    assert "no answer in time" in caught.value.message


def test_closing_a_stream_in_the_middle_is_seen_by_the_server() -> None:
    seen = threading.Event()

    def answer(peer: socket.socket, request: bytes) -> bool:
        chunked(b"data: 1\n\n", ends=False)(peer, request)
        peer.settimeout(5)
        if peer.recv(1) == b"":
            seen.set()
        return False

    with serving(answer) as (client, _):
        with client.post_stream("/v1/chat/completions", {}) as stream:
            next(stream)
        assert seen.wait(5)


def test_a_refused_stream_is_the_frontends_error() -> None:
    with serving(plain("404 x", b'{"error":{"message":"m","code":"model_not_found"}}')) as (client, _):
        with pytest.raises(NotFound) as caught:
            client.post_stream("/v1/chat/completions", {})
    assert caught.value.code == "model_not_found"


async def test_a_worker_registers_with_the_join_token_and_beats_with_its_own() -> None:
    register = b'{"id":"n","name":"a","node_type":"backend","status":"pending","created_at":"t","node_token":"own"}'
    answers = [register, b'{"message":"ok","mark":2.5}', b'{"message":"bye"}']

    def answer(peer: socket.socket, request: bytes) -> bool:
        return plain("201 Created", answers.pop(0))(peer, request)

    with serving(answer) as (client, server):
        link = WorkerLink(client)
        reply = await link.register(RegisterRequest(name="a", token="secret"))
        beat = await link.heartbeat(reply.id, reply.node_token, HeartbeatRequest())
        await link.deregister(reply.id, reply.node_token)
        assert (reply.node_token, beat.mark, link.local_address()) == ("own", 2.5, "127.0.0.1")
        first, second, third = server.requests
    assert first.startswith(b"POST /api/node/register ")
    assert b"Bearer secret" in first
    assert second.startswith(b"POST /api/node/n/heartbeat ")
    assert b"Bearer own" in second
    assert third.startswith(b"POST /api/node/n/deregister ")


async def test_a_worker_beats_with_the_join_token_where_a_go_frontend_gave_it_none_of_its_own() -> None:
    register = b'{"id":"n","name":"a","node_type":"backend","status":"healthy","created_at":"0001-01-01T00:00:00Z"}'
    answers = [register, b'{"message":"heartbeat received"}', b'{"message":"node set to offline"}']

    def answer(peer: socket.socket, request: bytes) -> bool:
        return plain("200 OK", answers.pop(0))(peer, request)

    with serving(answer) as (client, server):
        link = WorkerLink(client)
        reply = await link.register(RegisterRequest(name="a", token="secret"))
        await link.heartbeat(reply.id, reply.node_token, HeartbeatRequest())
        await link.deregister(reply.id, reply.node_token)
    assert [b"Authorization: Bearer secret\r\n" in request for request in server.requests] == [True] * 3


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        ("401 x", b'{"error":"invalid registration token"}', Unauthenticated),
        (
            "401 x",
            b'{"error":{"code":401,"message":"registration token required","type":"node_error"}}',
            Unauthenticated,
        ),
        ("404 x", b'{"error":{"code":404,"message":"node not found","type":"node_error"}}', NotFound),
        ("400 x", b'{"error":{"code":400,"message":"name is required","type":"node_error"}}', Malformed),
        ("500 x", b'{"error":{"code":500,"message":"failed to register node","type":"node_error"}}', Upstream),
    ],
)
def test_what_a_go_frontend_refuses_is_understood(status: str, body: bytes, kind: type[EnginehouseError]) -> None:
    """A worker that cannot tell a 404 from a frontend that is away would never join again."""
    with serving(plain(status, body)) as (client, _):
        with pytest.raises(kind) as caught:
            client.request_bytes("POST", "/api/node/n/heartbeat")
    assert type(caught.value) is kind
    assert caught.value.message.encode() in body
