"""`nodes add`: the line for another machine, its token beside it, and the digest of the script."""

from __future__ import annotations

import hashlib
import json
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from enginehouse.cli.main import program
from enginehouse.settings.programs import RunningServer

SCRIPT = b"#!/bin/sh\n"
DIGEST = hashlib.sha256(SCRIPT).hexdigest()


class Served(ThreadingHTTPServer):
    asked: list[Any]


class Answering(BaseHTTPRequestHandler):
    server: Served

    def do_GET(self) -> None:
        self._send(200 if self.path == "/join.sh" else 404, SCRIPT)

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._send(201, b'{"id": "1", "role": "join", "name": "n", "token": "eh-join-fresh"}')

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def server() -> Iterator[Served]:
    with Served(("127.0.0.1", 0), Answering) as made:
        made.asked = []
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join()


def add(data: Path, url: str, *words: str) -> Result:
    return CliRunner().invoke(
        program, ["--data", str(data), "--url", url, "nodes", "add", *words], env={"ENGINEHOUSE_TOKEN": "eh-admin-x"}
    )


def test_the_line_has_the_address_and_the_name_and_not_the_token(tmp_path: Path) -> None:
    with server() as made:
        url = f"http://127.0.0.1:{made.server_port}"
        result = add(tmp_path, url, "--name", "attic", "--service", "--join-url", "http://one:1,http://two:2")
    assert result.exit_code == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if "curl" in line]
    assert line.strip() == "curl -fsS http://one:1/join.sh | sh -s -- http://one:1,http://two:2 --name attic --service"
    assert "eh-join-fresh" in result.stdout.replace(line, "")
    assert DIGEST in result.stdout
    assert "enginehouse nodes approve attic" in result.stdout
    assert made.asked == [{"role": "join", "ttl_seconds": 3600.0, "node": "attic"}]


def test_the_address_is_that_at_which_others_reach_the_server_of_this_machine(tmp_path: Path) -> None:
    with server() as made:
        url = f"http://127.0.0.1:{made.server_port}"
        loopback = add(tmp_path, url)
        running = RunningServer(url, 1, "http://192.0.2.7:8080")
        (tmp_path / "server.json").write_bytes(msgspec.json.encode(running))
        result = add(tmp_path, url, "--json", "--ttl", "2h")
    assert "other machines cannot reach" in loopback.stderr
    answer = json.loads(result.stdout)
    assert shlex.split(answer["line"])[-1] == "http://192.0.2.7:8080"
    assert (answer["token"], answer["script_sha256"]) == ("eh-join-fresh", DIGEST)
    assert made.asked[-1]["ttl_seconds"] == 7200.0


@pytest.mark.parametrize("url", ["http://evil';reboot;'", "ftp://x", "http://a b", "$(reboot)"])
def test_an_address_that_is_none_makes_no_line_and_no_token(tmp_path: Path, url: str) -> None:
    with server() as made:
        result = add(tmp_path, f"http://127.0.0.1:{made.server_port}", "--join-url", url)
    if result.exit_code == 0:  # an odd host name is quoted, so that a shell reads it as one word
        (line,) = [line for line in result.stdout.splitlines() if "curl" in line]
        assert shlex.split(line)[-1] == url
    else:
        assert result.exit_code == 2
        assert made.asked == []
