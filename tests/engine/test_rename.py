"""The model's name on the way in and on the way out, wherever the bytes are cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.core.errors import Malformed
from enginehouse.engine.rename import Renamer, rename_request

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | names,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(names, json_values, max_size=5), names)
def test_only_the_model_of_a_request_changes(request: dict[str, object], name: str) -> None:
    renamed = json.loads(rename_request(json.dumps(request).encode(), name))
    assert renamed == {**request, "model": name}


def test_numbers_and_spaces_of_other_members_stay_as_they_were() -> None:
    body = b'{"temperature": 1.50, "model":"a", "messages": [ {"content": "\\u00e9"} ]}'
    assert rename_request(body, "b") == b'{"temperature":1.50,"model":"b","messages":[ {"content": "\\u00e9"} ]}'


@pytest.mark.parametrize("body", [b"", b"[]", b'"model"', b"{", b'{"a":\xff}' + b"["])
def test_a_request_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(Malformed):
        rename_request(body, "x")


def cut(body: bytes, cuts: list[int]) -> list[bytes]:
    borders = [0, *sorted(position % (len(body) + 1) for position in cuts), len(body)]
    return [body[start:end] for start, end in pairwise(borders)]


def renamed(pieces: list[bytes], engine: str, served: str) -> bytes:
    renamer = Renamer(engine, served)
    return b"".join([*(renamer.feed(piece) for piece in pieces), renamer.finish()])


@given(
    st.lists(st.fixed_dictionaries({"model": names | st.just("engine"), "text": names | st.just('"model":"engine"')})),
    names,
    st.lists(st.integers(0, 10_000), max_size=12),
    st.booleans(),
)
def test_the_answer_is_the_same_wherever_it_is_cut(
    events: list[dict[str, str]], served: str, cuts: list[int], is_ascii: bool
) -> None:
    body = "".join(f"data: {json.dumps(event, ensure_ascii=is_ascii)}\n\n" for event in events).encode()
    output = renamed(cut(body, cuts), "engine", served)
    found = [json.loads(line[6:]) for line in output.decode().split("\n\n") if line]
    assert found == [{**event, "model": served if event["model"] == "engine" else event["model"]} for event in events]


@given(names, names, st.lists(st.integers(0, 200), max_size=5), st.booleans())
def test_a_name_is_found_however_the_engine_escapes_it(
    engine: str, served: str, cuts: list[int], is_ascii: bool
) -> None:
    body = json.dumps({"model": engine}, ensure_ascii=is_ascii).encode()
    assert json.loads(renamed(cut(body, cuts), engine, served)) == {"model": served}


def test_the_text_of_a_model_that_speaks_about_itself_is_left_alone() -> None:
    body = json.dumps({"x": 'say "model": "engine" or \\"model": "engine"', 'y"model': "engine", "model": "engine"})
    assert json.loads(renamed([body.encode()], "engine", "served")) == {**json.loads(body), "model": "served"}


def test_whole_events_are_never_held_back() -> None:
    renamer = Renamer("engine", "served")
    event = b'data: {"model":"engine","text":"model"}\n\n'
    assert renamer.feed(event) == b'data: {"model":"served","text":"model"}\n\n'


def test_a_value_without_an_end_is_not_held_for_ever() -> None:
    renamer = Renamer("engine", "served")
    start = b'"model":"' + b"x" * 3000
    assert renamer.feed(start) == b""
    assert len(renamer.feed(b"x" * 3000)) > 0
