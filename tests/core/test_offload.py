"""How many layers go to the cards, and how many requests at once."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.core.capacity import Capacity, GraphicsCard
from enginehouse.core.demand import buffers_bytes
from enginehouse.core.load_options import ALL_LAYERS
from enginehouse.core.model import Model
from enginehouse.core.offload import Offload, ReplicaSize, is_on_one_card, plan_offload, splits_over_cards

GIB = 1024**3
LLAMA, VLLM = "cuda12-llama-cpp", "cuda12-vllm"
# Eight billion parameters in four bits: 32 layers, 128 KiB of cache per token.
SIZE = ReplicaSize(weights_bytes=int(4.6 * GIB), layers=32, cache_bytes=GIB)


def cards(*free_gib: float, total_gib: float = 24) -> Capacity:
    found = tuple(
        GraphicsCard(index=index, total_vram=int(total_gib * GIB), available_vram=int(free * GIB))
        for index, free in enumerate(free_gib)
    )
    free = sum(card.available_vram or 0 for card in found)
    total = sum(card.total_vram or 0 for card in found)
    return Capacity(gpu_vendor="nvidia", total_vram=total, available_vram=free, gpu_cards=found)


def layers(capacity: Capacity, directory: str = LLAMA, size: ReplicaSize = SIZE, *, has_card: bool = True) -> int:
    return plan_offload(size, capacity, directory, has_card=has_card).gpu_layers


def test_all_layers_go_to_a_card_with_room_and_none_without_a_card() -> None:
    assert layers(cards(24)) == ALL_LAYERS
    assert layers(Capacity(), has_card=False) == 0


def test_as_many_layers_as_fit_go_to_a_card_that_is_too_small() -> None:
    half = layers(cards(3, total_gib=3))
    assert 0 < half < 32
    per_layer = (SIZE.weights_bytes + SIZE.cache_bytes) / 32
    assert half * per_layer + buffers_bytes(SIZE.weights_bytes) <= 3 * GIB
    assert (half + 1) * per_layer + buffers_bytes(SIZE.weights_bytes) > 3 * GIB
    assert layers(cards(0)) == 0, "a card that is full"


def test_llama_cpp_counts_all_cards_and_other_engines_the_best_one() -> None:
    assert layers(cards(3.5, 3.5, total_gib=4)) == ALL_LAYERS
    assert layers(cards(3.5, 3.5, total_gib=4), VLLM) < 32
    assert layers(cards(3.5, 8), VLLM) == ALL_LAYERS


@pytest.mark.parametrize("configured", [0, 7, 999, -1])
def test_what_the_model_says_wins_over_every_machine(configured: int) -> None:
    size = msgspec.structs.replace(SIZE, gpu_layers=configured)
    assert layers(cards(1), size=size) == configured
    assert layers(Capacity(), size=size, has_card=False) == configured


@pytest.mark.parametrize(
    ("capacity", "size"),
    [
        (Capacity(gpu_vendor="vulkan"), SIZE),
        (cards(1), msgspec.structs.replace(SIZE, layers=0)),
        (cards(1), msgspec.structs.replace(SIZE, weights_bytes=0)),
    ],
)
def test_what_is_unknown_is_left_to_the_engine(capacity: Capacity, size: ReplicaSize) -> None:
    assert layers(capacity, size=size) == ALL_LAYERS


def test_a_machine_whose_single_cards_are_unknown_has_the_sum_of_them() -> None:
    unknown = msgspec.structs.replace(cards(8), gpu_cards=(GraphicsCard(total_vram=24 * GIB),))
    assert layers(unknown) == ALL_LAYERS
    assert layers(msgspec.structs.replace(unknown, available_vram=3 * GIB)) < 32
    assert layers(msgspec.structs.replace(unknown, gpu_cards=(), available_vram=3 * GIB)) < 32


@pytest.mark.parametrize(
    ("total_gib", "free_gib", "parallel"), [(2, 2, 0), (4, 4, 0), (8, 8, 2), (8, 5.9, 0), (12, 12, 4), (40, 40, 8)]
)
def test_requests_at_once_follow_the_card_and_fit_beside_the_weights(
    total_gib: float, free_gib: float, parallel: int
) -> None:
    assert plan_offload(SIZE, cards(free_gib, total_gib=total_gib), LLAMA, has_card=True).parallel == parallel


def test_requests_at_once_are_the_models_own_or_the_engines_where_no_card_computes() -> None:
    said = msgspec.structs.replace(SIZE, parallel=3)
    assert plan_offload(said, cards(40, total_gib=40), LLAMA, has_card=True).parallel == 3
    assert plan_offload(said, Capacity(), LLAMA, has_card=False) == Offload(gpu_layers=0, parallel=3)
    for directory in ("cpu-llama-cpp", VLLM):
        assert plan_offload(SIZE, cards(40, total_gib=40), directory, has_card=True).parallel == 0
    assert plan_offload(SIZE, Capacity(gpu_vendor="vulkan"), LLAMA, has_card=True).parallel == 0


def test_the_contexts_of_all_requests_count_where_the_model_wants_several() -> None:
    assert layers(cards(8)) == ALL_LAYERS
    assert layers(cards(8), size=msgspec.structs.replace(SIZE, parallel=8)) < 32


@given(
    st.integers(1, 10**12), st.integers(1, 200), st.integers(0, 10**11), st.lists(st.integers(0, 10**12), max_size=5)
)
def test_never_more_goes_to_the_cards_than_is_free_there(weights: int, count: int, cache: int, free: list[int]) -> None:
    size = ReplicaSize(weights_bytes=weights, layers=count, cache_bytes=cache)
    for directory in (LLAMA, VLLM):
        capacity = cards(*(one / GIB for one in free))
        found = plan_offload(size, capacity, directory, has_card=True)
        if not capacity.total_vram:
            continue
        known = [card.available_vram or 0 for card in capacity.gpu_cards]
        room = sum(known) if directory == LLAMA else max(known)
        part = min(found.gpu_layers, count) / count
        assert part * size.bytes_with(found.parallel) <= room * (1 + 1e-9)


def test_llama_cpp_splits_in_all_its_builds_and_others_only_if_the_model_says() -> None:
    assert all(map(splits_over_cards, ("llama-cpp", "cuda12-llama-cpp", "xllamacpp", "ik-llama-cpp")))
    assert not any(map(splits_over_cards, ("vllm", "diffusers", "cuda12-whisper")))
    model = Model(name="m", backend="vllm", files=())
    assert is_on_one_card(model, VLLM, "nvidia")
    assert not is_on_one_card(model, VLLM, "")
    assert not is_on_one_card(model, "cpu-vllm", "nvidia")
    assert not is_on_one_card(model, LLAMA, "nvidia")
    for config in ({"tensor_parallel_size": 2}, {"engine_args": {"tensor_parallel_size": 2}}):
        assert not is_on_one_card(msgspec.structs.replace(model, config=config), VLLM, "nvidia")
