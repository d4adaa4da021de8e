"""Prefixes of prompts: the text, its hashes, what is remembered of it, and the choice, against their plain meaning."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh64_intdigest

from enginehouse.core.prefix import (
    FULL,
    HALF_LIFE_SECONDS,
    MAX_REQUEST_BYTES,
    MAX_TEXT_BYTES,
    MAX_WINDOWS,
    PrefixIndex,
    Thresholds,
    choose_by_prefix,
    hash_chain,
    prompt_source,
)

TTL = 300.0


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def test_the_text_of_a_chat_is_role_and_content_of_each_message() -> None:
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Wer "}, {"type": "text", "text": "bist dú?"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    assert prompt_source(body(messages=messages)) == "system\nBe brief.\nuser\nWer bist dú?\nassistant\n\n".encode()


def test_the_text_of_a_completion_is_its_prompt() -> None:
    assert prompt_source(body(prompt="Once")) == b"Once"
    assert prompt_source(body(prompt=["Once", "Twice"])) == b"Once"
    assert prompt_source(body(prompt="")) == b""


@pytest.mark.parametrize(
    "given_body",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 5000,
        body(input="an embedding has no prompt"),
        body(prompt=[1, 2]),
        body(prompt=[]),
        body(messages=[]),
        body(messages=["not an object"]),
        body(messages=[{"role": 3}]),
        body(messages={"role": "user"}),
        body(prompt="x" * MAX_REQUEST_BYTES),
    ],
)
def test_what_has_no_text_or_is_too_long_to_be_read_twice_has_no_chain(given_body: bytes) -> None:
    assert prompt_source(given_body) == b""


@given(st.lists(st.integers(0, 9000), max_size=6))
def test_the_text_is_the_beginning_of_the_whole_text_however_long_messages_are(sizes: list[int]) -> None:
    messages = [{"role": "user", "content": f"{number}é" * size} for number, size in enumerate(sizes)]
    whole = "".join(f"{one['role']}\n{one['content']}\n" for one in messages).encode()
    assert prompt_source(body(messages=messages)) == whole[:MAX_TEXT_BYTES]


@given(st.text(max_size=20), st.binary(max_size=3 * 256 + 1))
def test_each_hash_covers_all_windows_before_it(model: str, text: bytes) -> None:
    expected = []
    last = xxh64_intdigest(model.encode(), seed=0)
    for window in (text[:256], text[256:512], text[512:768], text[768:]):
        if window:
            last = xxh64_intdigest(last.to_bytes(8, "little") + window, seed=0)
            expected.append(last)
    assert hash_chain(model, text, xxh64_intdigest) == tuple(expected)


def test_the_hash_is_xxhash64_and_a_chain_has_a_bounded_length() -> None:
    assert xxh64_intdigest(b"") == 0xEF46DB3751D8E999
    long = bytes(range(256)) * 100
    chain = hash_chain("m", long, xxh64_intdigest)
    assert len(chain) == len(set(chain)) == MAX_WINDOWS
    assert chain[:10] == hash_chain("m", long[:2560], xxh64_intdigest)
    assert not set(chain) & set(hash_chain("other", long, xxh64_intdigest)), "models do not share their tables"


class PlainIndex:
    """What the index means, without regard to its cost: every path with its replica and its time."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, ...], tuple[str, float]] = {}

    def observe(self, path: tuple[int, ...], replica: str, now: float) -> None:
        for end in range(1, len(path) + 1):
            self.seen[path[:end]] = (replica, now)

    def live(self, now: float) -> dict[tuple[int, ...], tuple[str, float]]:
        return {path: found for path, found in self.seen.items() if now - found[1] <= TTL}

    def match(self, path: tuple[int, ...], known: set[str], now: float) -> tuple[str, int]:
        live = self.live(now)
        for depth in range(len(path), 0, -1):
            found = live.get(path[:depth])
            if found is not None and found[0] in known:
                return found[0], depth
        return "", 0

    def weight(self, replica: str, now: float) -> float:
        live = self.live(now).values()
        return sum(float(0.5 ** ((now - seen) / HALF_LIFE_SECONDS)) for one, seen in live if one == replica)


def chain_of(path: tuple[int, ...]) -> tuple[int, ...]:
    return hash_chain("m", b"".join(bytes([one]) * 256 for one in path), xxh64_intdigest)


PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
STEPS = st.lists(
    st.tuples(PATHS, st.sampled_from("abc"), st.sampled_from([0, 1, 59, 140, 300, 301, 200_000])), max_size=25
)


@given(STEPS, PATHS, st.sets(st.sampled_from("abc")))
def test_the_index_finds_and_weighs_what_its_plain_meaning_does(
    steps: list[tuple[tuple[int, ...], str, int]], asked: tuple[int, ...], known: set[str]
) -> None:
    index, plain, now = PrefixIndex(TTL), PlainIndex(), 50.0
    for path, replica, pause in steps:
        index.observe(chain_of(path), replica, now)
        plain.observe(path, replica, now)
        assert index.match(chain_of(asked), known, now) == plain.match(asked, known, now)
        now += pause
        assert index.match(chain_of(asked), known, now) == plain.match(asked, known, now)
        index.sweep(now, 1000)
        assert len(index) == len(plain.live(now))
        assert set(index._sums) == {one for one, _ in plain.live(now).values()}
        weights = {one: index.weight(one, now) for one in "abc"}
        assert sorted("abc", key=index.relative_weight) == sorted("abc", key=weights.__getitem__)
        for one in "abc":
            assert index.weight(one, now) == pytest.approx(plain.weight(one, now), rel=1e-6, abs=1e-9)


def test_only_what_is_new_is_worth_telling() -> None:
    index = PrefixIndex(TTL)
    assert index.observe((1, 2), "a", 0.0)
    assert not index.observe((1, 2), "a", 1.0)
    assert not index.observe((1,), "a", 1.0)
    assert index.observe((1, 2, 3), "a", 1.0)
    assert index.observe((1,), "b", 1.0)
    assert not index.observe((), "a", 1.0)


def test_the_table_is_bounded_and_the_oldest_give_way_from_their_ends() -> None:
    index = PrefixIndex(TTL, max_entries=4)
    index.observe((1, 2, 3), "a", 0.0)
    index.observe((8, 9), "b", 0.0)
    assert len(index) == 4
    assert index.match((1, 2, 3), {"a"}, 0.0) == ("a", 2)
    assert index.match((8, 9), {"b"}, 0.0) == ("b", 2)
    assert index.weight("a", 0.0) == 2


@given(
    busy=st.lists(st.integers(FULL, 12), min_size=1, max_size=8),
    weights=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    hot=st.none() | st.integers(0, 7),
    absolute=st.integers(0, 5),
    relative=st.floats(1, 4),
)
def test_the_choice_is_the_hot_one_unless_it_is_much_busier_and_else_the_lightest(
    busy: list[int], weights: list[int], hot: int | None, absolute: int, relative: float
) -> None:
    hot = hot if hot is not None and hot < len(busy) else None
    chosen = choose_by_prefix(busy, hot, lambda one: float(weights[one]), Thresholds(absolute, relative, 0.3))
    taking = [count for count in busy if count != FULL]
    if not taking:
        assert chosen is None
        return
    least = min(taking)
    eligible = [
        position
        for position, count in enumerate(busy)
        if count != FULL and count <= least + absolute and count <= least * relative + 1
    ]
    assert eligible, "the least busy one always is"
    assert chosen == (hot if hot in eligible else min(eligible, key=lambda one: (weights[one], one)))


def test_the_thresholds_of_a_model_count_where_it_has_some() -> None:
    assert Thresholds().overridden(0, 0.0, 0.0) == Thresholds(2, 1.5, 0.3)
    assert Thresholds().overridden(7, 3.0, 0.9) == Thresholds(7, 3.0, 0.9)
