"""The stream of the whole cluster: opened again where it ended, whatever ended it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager

from tests.cli.recorded import WAIT_SECONDS, Answer, Reaction, Recorded, Stream, recorded, refused

from enginehouse.cli.client.connect import FrontendApi
from enginehouse.cli.client.live import LiveCluster
from enginehouse.cli.terminal.fleet_state import Arrival
from enginehouse.link.client import FrontendClient

EVENTS = "GET /api/events"
HELLO = "event: hello\ndata: {}\n\n"
FIRST = 'id: 17.500000\nevent: node\ndata: {"id": "a"}\n\n'

Next = Callable[[str], Arrival]


@contextmanager
def followed(answers: Mapping[str, Reaction | list[Reaction]]) -> Iterator[tuple[Recorded, LiveCluster, Next]]:
    """A played frontend that is followed, and the next arrival of a kind."""
    arrived: queue.Queue[Arrival] = queue.Queue()

    def following(what: str) -> Arrival:
        while True:
            found = arrived.get(timeout=WAIT_SECONDS)
            if found.what == what:
                return found

    with recorded(answers) as world, closing(FrontendClient(world.url, "secret", user_agent="tests")) as client:
        live = LiveCluster(FrontendApi(client, is_quiet=True))
        live.start(arrived.put)
        try:
            yield world, live, following
        finally:
            live.stop()


def last_ids(world: Recorded) -> list[str]:
    return [one.headers.get("Last-Event-ID", "") for one in world.requests if one.path == "/api/events"]


def test_a_stream_that_breaks_is_opened_again_after_its_last_event() -> None:
    held = threading.Event()
    streams: list[Reaction] = [Stream([HELLO, FIRST, FIRST[:20]], "cut"), Stream([HELLO], held)]
    with followed({EVENTS: streams}) as (world, live, following):
        assert following("connected").name == ""
        assert following("event").name == "hello"
        node = following("event")
        assert (node.name, node.body) == ("node", b'{"id": "a"}')
        following("disconnected")
        assert following("connected").name == "17.500000"
        assert last_ids(world) == ["", "17.500000"]
        assert live.heard_at() is not None
        held.set()


def test_a_stream_that_ends_in_order_is_opened_again_too() -> None:
    with followed({EVENTS: Stream([HELLO])}) as (world, _, following):
        for _ in range(3):
            following("connected")
        assert last_ids(world)[:3] == ["", "", ""]


def test_a_refusal_is_told_in_its_words_and_asked_again() -> None:
    held = threading.Event()
    streams: list[Reaction] = [refused(401, "cannot know who asks", "unauthenticated"), Stream([HELLO], held)]
    with followed({EVENTS: streams}) as (_, _, following):
        assert following("refused").name == "cannot know who asks"
        following("connected")
        held.set()


def test_a_frontend_that_is_gone_is_looked_for_until_it_is_back() -> None:
    held = threading.Event()
    with followed({EVENTS: [Stream([HELLO, FIRST], "cut"), Stream([HELLO], held)]}) as (world, live, following):
        following("connected")
        world.stop()
        for _ in range(3):
            following("disconnected")
        assert live.heard_at() is None
        world.start()
        assert following("connected").name == "17.500000"
        held.set()


def test_lists_are_read_when_they_are_asked_for_and_told_when_they_cannot_be() -> None:
    held = threading.Event()
    answers: dict[str, Reaction | list[Reaction]] = {
        EVENTS: Stream([HELLO], held),
        "GET /api/operations?all=true&limit=50": Answer({"operations": [{"jobID": "new"}]}),
        "GET /api/operations": Answer({"operations": [{"jobID": "old"}]}),
        "GET /backends": refused(503, "cannot read", "store_unavailable"),
    }
    with followed(answers) as (_, live, following):
        live.read(["operations", "backends"])
        listed = following("list")
        assert listed.name == "operations"
        assert listed.body == {"operations": [{"jobID": "new"}, {"jobID": "old"}]}
        assert listed.began <= listed.at
        assert following("unread").name == "backends"
        held.set()
