"""The choice among routes by prefixes: what sticks, what gives way, what other frontends learn."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from enginehouse.core.ids import NodeId
from enginehouse.core.prefix import DISTURBED_SECONDS, FULL, Thresholds
from enginehouse.core.routing import Route
from enginehouse.core.schedule import Schedule
from enginehouse.frontend.serving.prefixes import COMPARED, MAX_TOLD, Candidates, Chain, Prefixes


def route(number: int) -> Route:
    return Route(
        model="tiny",
        slot=0,
        node_id=NodeId(f"n{number:03d}"),
        node_name=f"n{number:03d}",
        address="h:1",
        key="k",
        revision="r",
        nonce=f"p{number}",
    )


class Desk:
    """Prefixes on a clock that a test moves, with some routes and how busy they are."""

    def __init__(self, number: int) -> None:
        self.now = 100.0
        self.prefixes = Prefixes(lambda: self.now, default=Thresholds())
        self.routes = [route(one) for one in range(number)]
        self.busy = dict.fromkeys((one.id for one in self.routes), 0)

    def chain(self, text: str) -> Chain:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
        return self.prefixes.chain_of("tiny", json.dumps(body).encode())

    def ask(self, text: str) -> Route | None:
        known = {one.id: one for one in self.routes}
        among = Candidates(self.routes, known, Thresholds())
        return self.prefixes.choose(self.chain(text), among, lambda one: self.busy[one.id])


def talk(turns: int, topic: str = "a") -> str:
    return "".join(f"{topic}{turn} " * 100 for turn in range(turns))


def test_a_conversation_stays_where_it_began_and_others_go_elsewhere() -> None:
    desk = Desk(3)
    first = desk.ask(talk(2))
    second = desk.ask(talk(2, "b"))
    assert first is not None
    assert first is not second
    for turns in range(3, 6):
        desk.now += 30
        assert desk.ask(talk(turns)) is first
        assert desk.ask(talk(turns, "b")) is second
    assert desk.prefixes.disturbed() == {}


def test_a_replica_that_is_much_busier_loses_its_requests_and_that_is_noted() -> None:
    desk = Desk(2)
    first = desk.ask(talk(4))
    assert first is not None
    desk.busy[first.id] = 1
    assert desk.ask(talk(4)) is first, "1 is within 0 + 2 and within 0 x 1.5 + 1"
    desk.busy[first.id] = 2
    second = desk.ask(talk(4))
    assert second is not first
    assert desk.prefixes.disturbances == {"tiny": 1}
    desk.now += 10
    assert desk.prefixes.disturbed() == {"tiny": 10.0}
    assert desk.ask(talk(4)) is second, "the last one wins"
    desk.now += DISTURBED_SECONDS
    desk.prefixes.sweep()
    assert desk.prefixes.disturbed() == {}


def test_a_weak_match_binds_nobody() -> None:
    desk = Desk(2)
    first = desk.ask("same " * 60)
    assert desk.ask("same " * 60 + talk(20)) is not first
    assert desk.prefixes.disturbances == {}


def test_a_full_replica_takes_nothing_even_with_the_prefix() -> None:
    desk = Desk(2)
    first = desk.ask(talk(4))
    assert first is not None
    desk.busy[first.id] = FULL
    assert desk.ask(talk(4)) not in (None, first)
    for one in desk.routes:
        desk.busy[one.id] = FULL
    assert desk.ask(talk(4)) is None


def test_what_was_seen_long_ago_is_forgotten() -> None:
    desk = Desk(2)
    first = desk.ask(talk(4))
    assert first is not None
    desk.ask("another")
    desk.busy[first.id] = 1
    desk.now += 299
    assert desk.ask(talk(4)) is first
    desk.now += 301
    desk.busy[desk.routes[0].id] = desk.routes[0] is first
    assert desk.ask(talk(4)) is desk.routes[0], "nothing is known: the first of equals"


def test_of_very_many_routes_the_one_with_the_prefix_is_found_and_new_ones_are_spread() -> None:
    desk = Desk(10 * COMPARED)
    taken = Counter(desk.ask(talk(3, f"topic {number} ")) for number in range(10 * COMPARED))
    assert max(taken.values()) <= 3
    first = desk.ask(talk(3, "mine "))
    assert first is not None
    for _ in range(50):
        assert desk.ask(talk(3, "mine ")) is first
    for one in desk.routes:
        desk.busy[one.id] = FULL
    desk.busy[desk.routes[77].id] = 9
    assert desk.ask(talk(3, "mine ")) is desk.routes[77], "wherever there is room"
    assert desk.prefixes.disturbances == {"tiny": 1}
    desk.busy = dict.fromkeys(desk.busy, 0)
    assert desk.ask(talk(3, "mine ")) is desk.routes[77], "and there it is expected from now on"


def test_other_frontends_learn_what_is_new_once() -> None:
    desk, other = Desk(2), Desk(2)
    first = desk.ask(talk(4))
    assert first is not None
    told = desk.prefixes.untold()
    assert [route_id for route_id, _ in told] == [first.id]
    desk.ask(talk(4))
    assert desk.prefixes.untold() == []
    other.ask("so that the other one would be the lightest")
    other.prefixes.untold()
    other.prefixes.take(told)
    chosen = other.ask(talk(4))
    assert chosen is not None
    assert chosen.id == first.id
    assert other.prefixes.untold() == [], "what was told is not told again"
    for number in range(MAX_TOLD + 10):
        desk.ask(f"number {number}")
    assert len(desk.prefixes.untold()) == MAX_TOLD


@pytest.mark.parametrize(
    ("default", "policy", "expected"),
    [
        (Thresholds(), "", True),
        (Thresholds(), "round_robin", False),
        (Thresholds(), "prefix_cache", True),
        (None, "", False),
        (None, "prefix_cache", True),
    ],
)
def test_the_policy_of_a_model_counts_before_the_default(
    default: Thresholds | None, policy: str, expected: bool
) -> None:
    prefixes = Prefixes(lambda: 0.0, default=default)
    schedule = Schedule(model_name="m", route_policy=policy, balance_abs_threshold=9)
    found = prefixes.thresholds_of(schedule)
    assert (found is not None) == expected
    assert found is None or found == Thresholds(9, 1.5, 0.3)
    assert prefixes.thresholds_of(None) == default
