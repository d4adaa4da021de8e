"""The last hour in memory: what each step has, what is unknown, and how large it can become."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from enginehouse.core.capacity import Capacity
from enginehouse.core.ids import NodeId
from enginehouse.core.pulse import History
from enginehouse.frontend.watching.past import MAX_MODELS, SERIES, STEPS, Past
from enginehouse.frontend.watching.traffic import Occupancy, Sums, Tallied
from enginehouse.store.liveness import HeardNode

GIB = 2**30
CAPACITY = Capacity(cores=4, used_cores=1.25, total_ram=16 * GIB, available_ram=10 * GIB)
NOBODY = Occupancy()


def counted(model: str = "tiny", requests: int = 10, first_tokens: int = 0) -> Sums:
    one = Tallied()
    one.requests, one.tokens, one.errors = requests, 5 * requests, requests // 10
    one.first_tokens, one.first_token_seconds = first_tokens, 0.25 * first_tokens
    return {(model, "n1"): one}


def node(name: str = "n1", capacity: Capacity = CAPACITY) -> HeardNode:
    return HeardNode(NodeId(name), "healthy", 1.0, capacity)


async def shown(past: Past, only: set[NodeId] | None = None) -> Any:
    encoded = await past.encoded(only)
    assert msgspec.json.decode(encoded, type=History).step_seconds == 10.0
    return json.loads(encoded)


def end(past: Past, at: float, nodes: Sequence[HeardNode] | None = (), store_time: float | None = None) -> None:
    past.end_step(at, store_time if store_time is not None else 5000.0 + at, NOBODY, nodes)


async def test_an_hour_has_360_points_the_oldest_first_and_what_was_before_the_start_is_unknown() -> None:
    past = Past(100.0)
    assert not past.is_due(109.9)
    past.add(counted(requests=20, first_tokens=4))
    past.add(counted(requests=20))
    assert past.is_due(110.0)
    past.end_step(110.0, 5110.0, Occupancy(in_flight=3, queued_by_model={"tiny": 2}), [node()])
    end(past, 120.0, [node()])
    found = await shown(past)
    assert found["ends_at"] == 5120.0
    assert set(found["series"]) == set(SERIES)
    for series in (*found["series"].values(), *found["nodes"]["n1"].values(), *found["models"]["tiny"].values()):
        assert len(series) == STEPS
        assert series[:-2] == [None] * (STEPS - 2)
    assert {name: series[-2:] for name, series in found["series"].items()} == {
        "requests_per_second": [4.0, 0.0],
        "tokens_per_second": [20.0, 0.0],
        "time_to_first_token_seconds": [0.25, None],
        "errors_per_second": [0.4, 0.0],
        "queued": [2, 0],
        "in_flight": [3, 0],
    }
    assert found["models"]["tiny"]["requests_per_second"][-2:] == [4.0, 0.0]
    assert found["models"]["tiny"]["time_to_first_token_seconds"][-2:] == [0.25, None]
    assert found["nodes"]["n1"]["used_ram"][-1] == 6 * GIB
    assert found["nodes"]["n1"]["used_vram"][-1] is None, "it has no card, and unknown is not 0"
    assert found["nodes"]["n1"]["used_cores"][-1] == 1.25


async def test_steps_that_were_missed_are_unknown_and_the_ring_goes_round() -> None:
    past = Past(0.0)
    for step in range(1, STEPS + 3):
        past.add(counted(requests=step * 10))
        end(past, step * 10.0)
    end(past, (STEPS + 5) * 10.0)  # frozen for two of them
    rates = (await shown(past))["series"]["requests_per_second"]
    assert rates[-3:] == [None, None, 0.0]
    assert rates[0] == 6.0
    assert rates[-4] == STEPS + 2
    end(past, (10 * STEPS) * 10.0)
    assert (await shown(past))["series"]["requests_per_second"][:-1] == [None] * (STEPS - 1)


async def test_a_node_that_is_away_or_unknown_is_never_0_and_a_removed_one_is_forgotten() -> None:
    past = Past(0.0)
    end(past, 10.0, [node("n1"), node("n2")])
    end(past, 20.0, [node("n2")])
    end(past, 30.0, None)
    end(past, 40.0, [node("n1", Capacity())])
    found = (await shown(past))["nodes"]
    assert found["n1"]["used_cores"][-4:] == [1.25, None, None, None]
    assert found["n2"]["used_cores"][-4:] == [1.25, 1.25, None, None]
    assert (await shown(past, {NodeId("n2"), NodeId("unknown")}))["nodes"].keys() == {"n2"}
    assert (await shown(past, set()))["nodes"] == {}
    past.keep_only({NodeId("n1")})
    assert (await shown(past))["nodes"].keys() == {"n1"}


async def test_a_model_is_shown_for_an_hour_after_its_last_request_and_was_idle_before_its_first() -> None:
    past = Past(0.0)
    end(past, 10.0)
    past.add(counted("tiny"))
    past.add(counted(""))  # of a model that does not exist
    end(past, 20.0)
    models = (await shown(past))["models"]
    assert models.keys() == {"tiny"}
    assert models["tiny"]["requests_per_second"][-3:] == [None, 0.0, 1.0]
    for step in range(3, STEPS + 2):
        end(past, step * 10.0)
    assert (await shown(past))["models"].keys() == {"tiny"}
    end(past, (STEPS + 2) * 10.0)
    assert (await shown(past))["models"] == {}


async def test_of_too_many_models_the_ones_asked_last_and_most_are_kept_and_the_others_are_not_shown_as_idle() -> None:
    past = Past(0.0)
    past.add(counted("left out", requests=1))
    end(past, 10.0)
    for number in range(MAX_MODELS):
        past.add(counted(f"m{number}", requests=number + 1))
    end(past, 20.0)
    models = (await shown(past))["models"]
    assert models.keys() == {f"m{number}" for number in range(MAX_MODELS)}
    past.add(counted("left out", requests=1000))
    end(past, 30.0)
    models = (await shown(past))["models"]
    assert len(models) == MAX_MODELS
    assert models["left out"]["requests_per_second"][-3:] == [None, None, 100.0]


async def test_without_the_store_requests_are_remembered_and_the_end_of_the_steps_is_reckoned() -> None:
    past = Past(0.0)
    past.end_step(10.0, None, NOBODY, None)
    assert (await shown(past))["ends_at"] is None
    past.end_step(21.0, 5021.0, NOBODY, None)
    past.add(counted(requests=18))
    past.end_step(30.0, None, NOBODY, None)
    found = await shown(past)
    assert found["ends_at"] == 5030.0
    assert found["series"]["requests_per_second"][-1] == 2.0


@pytest.mark.parametrize("size", [1000])
def test_an_hour_of_a_thousand_nodes_takes_less_than_ten_megabytes(size: int) -> None:
    nodes = [node(f"node-{number}") for number in range(size)]
    tracemalloc.start()
    try:
        past = Past(0.0)
        for step in range(1, STEPS + 2):
            for number in range(MAX_MODELS) if step < 3 else ():
                past.add(counted(f"m{number}"))
            end(past, step * 10.0, nodes if step % 60 < 2 else ())
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 1_000_000 < taken < 10_000_000
