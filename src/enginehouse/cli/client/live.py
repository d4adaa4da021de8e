"""Follows the whole cluster: one event stream, and the lists that somebody asks for.

Two threads, because the client blocks: one reads the stream and opens it again, with growing pauses, after the last
event that had an id; the other reads lists. Both only pass on what arrives. The stream is never given up: a frontend
that refuses it may be asked again with the same token.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable

from enginehouse.cli.client.connect import FrontendApi
from enginehouse.cli.client.listing import every_node
from enginehouse.cli.terminal.fleet_state import PATHS, Arrival, ListName
from enginehouse.core.errors import EnginehouseError, Unavailable
from enginehouse.link.client import EventStream

SILENCE_SECONDS = 12.0  # the stream says something every five seconds; twice in vain, and it is opened anew
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 2.0  # short, to notice soon that a frontend is back
LIST_SECONDS = 10.0
LEAVE_SECONDS = 0.5
LISTED = 50  # operations that have ended

Take = Callable[[Arrival], None]


class LiveCluster:
    """The frontend of this command, for somebody who stays."""

    def __init__(self, frontend: FrontendApi) -> None:
        self.frontend = frontend
        self._stream: EventStream | None = None
        self._over = threading.Event()
        self._asked: queue.SimpleQueue[ListName | None] = queue.SimpleQueue()
        self._last_id = ""
        self._threads: list[threading.Thread] = []

    @property
    def url(self) -> str:
        return self.frontend.url

    def heard_at(self) -> float | None:
        """When the open stream said anything last, comments too; None while it is not open."""
        stream = self._stream
        return stream.heard_at if stream is not None else None

    def request(self, method: str, path: str, body: object = None) -> object:
        if method == "GET":
            return self.frontend.get(path)
        return self.frontend.request(method, path, body)

    def start(self, take: Take) -> None:
        self._threads = [
            threading.Thread(target=run, args=(take,), daemon=True) for run in (self._follow, self._read_lists)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, names: Iterable[ListName]) -> None:
        for name in names:
            self._asked.put(name)

    def stop(self) -> None:
        self._over.set()
        self._asked.put(None)
        stream = self._stream
        if stream is not None:
            stream.interrupt()
        # Whoever waits for a frontend that does not answer ends with the program.
        for thread in self._threads:
            thread.join(LEAVE_SECONDS)

    def _follow(self, take: Take) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._over.is_set():
            try:
                if self._read_stream(take):
                    pause = FIRST_PAUSE_SECONDS
                take(Arrival("disconnected", time.monotonic()))
            except Unavailable:
                take(Arrival("disconnected", time.monotonic()))
            except EnginehouseError as error:
                take(Arrival("refused", time.monotonic(), error.message))
                self._last_id = ""  # it may be the reason
            self._over.wait(pause)
            pause = min(LONGEST_PAUSE_SECONDS, pause * 2)

    def _read_stream(self, take: Take) -> bool:
        """Until it ends; whether there was any event."""
        resumed = self._last_id
        found = False
        with self.frontend.client.stream_events(
            "/api/events", silence_seconds=SILENCE_SECONDS, last_event_id=resumed
        ) as stream:
            self._stream = stream
            try:
                take(Arrival("connected", time.monotonic(), resumed))
                for event in stream:
                    if self._over.is_set():
                        break
                    found = True
                    take(Arrival("event", stream.heard_at, event.event, event.data))
                    self._last_id = event.id or self._last_id
            finally:
                self._stream = None
        return found

    def _read_lists(self, take: Take) -> None:
        while (name := self._asked.get()) is not None:
            began = time.monotonic()
            try:
                answer = self.list(name)
            except EnginehouseError:
                take(Arrival("unread", time.monotonic(), name))
            else:
                take(Arrival("list", time.monotonic(), name, answer, began))

    def list(self, name: ListName) -> object:
        """One list of the frontend, as `FleetState.take_list` reads it."""
        if name == "nodes":
            return every_node(self.frontend, LIST_SECONDS)
        if name != "operations":
            return self.frontend.get(PATHS[name], timeout_seconds=LIST_SECONDS)
        # Failures stay open until somebody dismisses them, however old they are.
        pages = [
            self.frontend.get(f"{PATHS[name]}{query}", timeout_seconds=LIST_SECONDS)
            for query in (f"?all=true&limit={LISTED}", "")
        ]
        return {"operations": [one for page in pages if isinstance(page, dict) for one in page.get("operations", ())]}
