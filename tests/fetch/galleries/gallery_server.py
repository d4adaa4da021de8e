"""A small real HTTP server for gallery documents: answers by path, with ETags, and a record of what was asked. And one
gallery on it, through the real client.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from enginehouse.core.gallery_source import GallerySource
from enginehouse.fetch.galleries.sources import Sources
from enginehouse.fetch.http.addresses import Rules
from enginehouse.fetch.http.client import Client

ONE = b"- {name: one, uri: quay.io/a/b:1}\n"


class GalleryServer:
    def __init__(self) -> None:
        self.documents: dict[str, bytes | int] = {}  # a number is a status
        self.asked: list[tuple[str, str, int]] = []  # path, If-None-Match, status of the answer
        self.port = 0

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, path: str) -> str:
        return f"http://{self.host}{path}"

    def take(self) -> list[tuple[str, str, int]]:
        taken, self.asked = self.asked, []
        return taken


@contextmanager
def serving() -> Iterator[GalleryServer]:
    world = GalleryServer()

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = world.documents.get(self.path, 404)
            body = found if isinstance(found, bytes) else b""
            tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            known = self.headers.get("if-none-match", "")
            status = found if isinstance(found, int) else 304 if known == tag else 200
            world.asked.append((self.path, known, status))
            self.send_response(status)
            if status in (200, 304):
                self.send_header("etag", tag)
            self.send_header("content-length", str(len(body) if status == 200 else 0))
            self.end_headers()
            if status == 200:
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """The record is enough."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A client that has seen enough cuts the connection; that is no news."""

    server = Server(("127.0.0.1", 0), Answers)
    world.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield world
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class World:
    """One source on a real server, through the real client, with a clock that tests move."""

    def __init__(self, server: GalleryServer, directory: Path) -> None:
        self.server = server
        self.directory = directory
        self.now = 1_000_000.0
        self.source = GallerySource(name="ours", url=server.url("/index.yaml"), mirrors=(server.url("/mirror.yaml"),))
        self.client = Client(Rules((server.host,)))

    def sources(self, *sources: GallerySource) -> Sources:
        return Sources(sources or (self.source,), self.client, self.directory, now=lambda: self.now)

    async def loaded(self) -> Sources:
        self.server.documents["/index.yaml"] = ONE
        sources = self.sources()
        await sources.refresh()
        assert names(sources) == ["one"]
        self.server.take()
        return sources


def names(sources: Sources) -> list[str]:
    return [entry.name for gallery in sources.galleries for entry in gallery.backends]
