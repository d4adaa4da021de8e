"""A small real HTTP server in a thread that plays answers of a frontend, and shapes of such answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from click.testing import CliRunner, Result

from enginehouse.cli.main import program

JOB = "3f2a9c1d-0000-4000-8000-000000000001"
WAIT_SECONDS = 20.0


class Request(NamedTuple):
    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


class Answer(NamedTuple):
    body: object
    status: int = 200
    headers: Mapping[str, str] = {}


class Stream(NamedTuple):
    """Events, then what happens: `end` closes in order, `cut` breaks the chunked body, an Event is waited for."""

    events: Sequence[tuple[str, object] | str]
    then: str | threading.Event = "end"


Reaction = Answer | Stream | Callable[[Request], Answer | Stream]


class Recorded:
    """Answers by method and path; a list is played one by one and its last one stays."""

    def __init__(self, answers: Mapping[str, Reaction | list[Reaction]]) -> None:
        self.answers = dict(answers)
        self.requests: list[Request] = []
        self.changed = threading.Condition()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        world = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                world.react(self)

            do_POST = do_DELETE = do_PUT = do_PATCH = do_HEAD = do_GET

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # a client that leaves in the middle is part of the tests

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def wait_for(self, path: str, count: int = 1) -> None:
        with self.changed:
            found = self.changed.wait_for(
                lambda: sum(one.path.startswith(path) for one in self.requests) >= count, WAIT_SECONDS
            )
        assert found, f"{path} was not asked for {count} times: {[one.path for one in self.requests]}"

    def bodies(self, path: str) -> list[Any]:
        return [one.body for one in self.requests if one.path == path]

    def react(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("content-length") or 0)
        content = handler.rfile.read(length)
        request = Request(handler.command, handler.path, dict(handler.headers), _decoded(content) if content else None)
        with self.changed:
            self.requests.append(request)
            reaction = self._next(request)
            self.changed.notify_all()
        if callable(reaction) and not isinstance(reaction, Answer | Stream):
            reaction = reaction(request)
        if isinstance(reaction, Answer):
            _send(handler, reaction)
        else:
            _stream(handler, reaction)

    def _next(self, request: Request) -> Reaction:
        reaction = self.answers.get(f"{request.method} {request.path}")
        if isinstance(reaction, list):
            reaction = reaction.pop(0) if len(reaction) > 1 else reaction[0]
        return reaction if reaction is not None else refused(404, f"cannot find {request.path}", "not_found")


def _decoded(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content


def _send(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
    content = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
    handler.send_response(answer.status)
    for name, value in {"content-type": "application/json", **answer.headers}.items():
        handler.send_header(name, value)
    handler.send_header("content-length", str(len(content)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(content)


def _stream(handler: BaseHTTPRequestHandler, stream: Stream) -> None:
    handler.send_response(200)
    handler.send_header("content-type", "text/event-stream")
    handler.send_header("transfer-encoding", "chunked")
    handler.end_headers()
    for event in stream.events:
        text = event if isinstance(event, str) else f"event: {event[0]}\ndata: {json.dumps(event[1])}\n\n"
        content = text.encode()
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
        handler.wfile.flush()
    handler.close_connection = True
    if isinstance(stream.then, threading.Event):
        stream.then.wait(WAIT_SECONDS)
    elif stream.then == "end":
        handler.wfile.write(b"0\r\n\r\n")


@contextmanager
def recorded(answers: Mapping[str, Reaction | list[Reaction]]) -> Iterator[Recorded]:
    world = Recorded(answers)
    world.start()
    try:
        yield world
    finally:
        world.stop()


def environment(world: Recorded, tmp_path: Path) -> dict[str, str]:
    return {
        "ENGINEHOUSE_URL": world.url,
        "ENGINEHOUSE_TOKEN": "secret-token",
        "ENGINEHOUSE_DATA": str(tmp_path),
        "LANG": "C.UTF-8",
        "COLUMNS": "120",
    }


def run(world: Recorded, tmp_path: Path, *arguments: str, stdin: str | None = None) -> Result:
    result = CliRunner().invoke(program, list(arguments), input=stdin, env=environment(world, tmp_path))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def refused(status: int, message: str, code: str, **extra: object) -> Answer:
    return Answer({"error": {"message": message, "type": "x", "code": code, "request_id": "r"}, **extra}, status)


def row(node: str = "main", status: str = "downloading", **fields: object) -> dict[str, object]:
    return {
        "node_id": f"id-of-{node}",
        "node_name": node,
        "action": "install llama-cpp",
        "kind": "install_backend",
        "intent": f"intent-{node}-{fields.get('action', '')}",
        "state": "running",
        "status": status,
        "percentage": 0.0,
        "attempt": 1,
        **fields,
    }


def operation(status: str, *rows: dict[str, object], **fields: object) -> dict[str, object]:
    return {
        "id": "llama-cpp",
        "name": "llama-cpp",
        "fullName": "llama-cpp",
        "jobID": JOB,
        "kind": "install",
        "status": status,
        "isParked": False,
        "author": "admin",
        "createdAt": "2026-01-01T00:00:00Z",
        "progress": 0,
        "taskType": "Installation",
        "isDeletion": False,
        "isBackend": True,
        "isQueued": status == "queued",
        "cancellable": False,
        "message": status,
        "excluded": [],
        "targets": [],
        "asked": {},
        "dismissed": False,
        "nodes": list(rows),
        **fields,
    }
