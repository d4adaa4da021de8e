"""The queue that is fair between tokens, against its plain meaning."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from enginehouse.core.fair_queue import FairQueue


def filled(**counts: int) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue()
    for token, count in counts.items():
        for number in range(count):
            queue.add(token, f"{token}{number}")
    return queue


def drained(queue: FairQueue[str]) -> list[str]:
    found = []
    while (entry := queue.take()) is not None:
        found.append(entry)
    return found


def test_a_token_with_a_thousand_entries_delays_another_by_one() -> None:
    order = drained(filled(greedy=1000, modest=2))
    assert order[:5] == ["greedy0", "modest0", "greedy1", "modest1", "greedy2"]
    assert len(order) == 1002


def test_who_comes_back_waits_for_its_turn() -> None:
    queue = filled(a=2, b=1)
    assert queue.take() == "a0"
    assert queue.take() == "b0"
    queue.add("b", "b1")
    assert drained(queue) == ["a1", "b1"]


def test_an_entry_can_leave() -> None:
    queue = filled(a=2, b=1)
    assert queue.remove("a", "a0")
    assert not queue.remove("a", "a0")
    assert not queue.remove("nobody", "a1")
    assert drained(queue) == ["a1", "b0"]


def test_in_a_full_queue_the_last_of_the_greediest_gives_way_to_others_only() -> None:
    queue = filled(greedy=5, modest=1)
    assert queue.displaced_by("modest") == "greedy4"
    assert queue.displaced_by("new") == "greedy3"
    assert queue.displaced_by("greedy") is None
    assert len(queue) == 4
    even = filled(a=2, b=2)
    assert even.displaced_by("a") is None, "nobody has more"
    assert filled().displaced_by("a") is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_each_token_is_served_in_order_and_none_waits_more_than_a_round(steps: list[tuple[str, bool]]) -> None:
    queue: FairQueue[str] = FairQueue()
    waiting: dict[str, list[str]] = {token: [] for token in "abc"}
    since: Counter[str] = Counter()  # entries of others that were taken since a token's first one waits
    for number, (token, takes) in enumerate(steps):
        if not takes:
            if not waiting[token]:
                since[token] = 0
            waiting[token].append(f"{token}{number}")
            queue.add(token, f"{token}{number}")
            continue
        entry = queue.take()
        if entry is None:
            assert not any(waiting.values())
            continue
        owner = entry[0]
        assert waiting[owner].pop(0) == entry
        since[owner] = 0
        for other in "abc":
            if other != owner and waiting[other]:
                since[other] += 1
                assert since[other] <= 2
    assert len(queue) == sum(len(some) for some in waiting.values())
