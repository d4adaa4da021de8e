"""What an engine is told on a machine with certain cards, with a real file of a model."""

from __future__ import annotations

import platform
from pathlib import Path

import msgspec
import pytest
from tests.core.gguf_files import gguf

from enginehouse.core.capacity import GraphicsCard
from enginehouse.core.load_options import ALL_LAYERS
from enginehouse.core.model import Model, ModelFile, ModelOptions
from enginehouse.host import hardware
from enginehouse.host.graphics import Graphics
from enginehouse.worker.engines.fitting import card_variables, fit

GIB = 1024**3
LLAMA, VLLM = "cuda12-llama-cpp", "cuda12-vllm"
MODEL = Model(name="m", backend="llama-cpp", files=(ModelFile("m.gguf", "hf:o/r", "0" * 64, 4 * GIB),))


def have(monkeypatch: pytest.MonkeyPatch, *free_gib: float, vendor: str = "nvidia") -> None:
    """A machine with these cards, each of 24 GiB; without any if none is given."""
    cards = tuple(
        GraphicsCard(index=index, total_vram=24 * GIB, available_vram=int(free * GIB))
        for index, free in enumerate(free_gib)
    )
    seen = Graphics(
        vendor=vendor if cards else "",
        total_bytes=len(cards) * 24 * GIB,
        free_bytes=sum(card.available_vram or 0 for card in cards),
        cards=cards,
    )
    monkeypatch.setattr(hardware._graphics, "look", lambda kept_seconds=None: seen)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf({"general.architecture": "llama", "llama.block_count": 32, "llama.context_length": 2048}))
    return path


def test_layers_follow_from_the_header_and_the_free_memory_of_the_card(
    monkeypatch: pytest.MonkeyPatch, weights: Path
) -> None:
    have(monkeypatch, 24)
    assert fit(MODEL, weights, LLAMA).gpu_layers == ALL_LAYERS
    have(monkeypatch, 2.5)
    assert 0 < fit(MODEL, weights, LLAMA).gpu_layers < 32
    have(monkeypatch)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert fit(MODEL, weights, LLAMA).gpu_layers == 0
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert fit(MODEL, weights, "metal-llama-cpp").gpu_layers == ALL_LAYERS, "a Mac always has a card"


def test_the_configuration_wins_and_the_context_is_its_own_or_the_files(
    monkeypatch: pytest.MonkeyPatch, weights: Path
) -> None:
    have(monkeypatch, 2.5)
    said = msgspec.structs.replace(MODEL, config={"gpu_layers": 3}, options=ModelOptions(context_size=77, parallel=5))
    found = fit(said, weights, LLAMA)
    assert (found.gpu_layers, found.context_size, found.parallel) == (3, 77, 5)
    assert fit(MODEL, weights, LLAMA).context_size == 2048


def test_a_file_without_a_header_is_no_reason_not_to_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    have(monkeypatch, 1)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03")
    for path in (None, tmp_path / "absent", broken):
        found = fit(MODEL, path, LLAMA)
        assert (found.context_size, found.gpu_layers) == (0, ALL_LAYERS)


def test_an_engine_that_uses_one_card_gets_the_one_with_the_most_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 3, 20, 5)
    assert card_variables(MODEL, VLLM, {}) == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("directory", "given", "config"),
    [
        (LLAMA, {}, {}),
        ("cpu-vllm", {}, {}),
        (VLLM, {"CUDA_VISIBLE_DEVICES": "0"}, {}),
        (VLLM, {}, {"main_gpu": "0"}),
        (VLLM, {}, {"tensor_parallel_size": 2}),
    ],
)
def test_an_engine_that_splits_or_whose_cards_somebody_chose_keeps_all_of_them(
    monkeypatch: pytest.MonkeyPatch, directory: str, given: dict[str, str], config: dict[str, object]
) -> None:
    have(monkeypatch, 3, 20)
    assert card_variables(msgspec.structs.replace(MODEL, config=config), directory, given) == {}


def test_one_card_and_cards_of_other_vendors_are_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 20)
    assert card_variables(MODEL, VLLM, {}) == {}
    have(monkeypatch, 20, 3, vendor="amd")
    assert card_variables(MODEL, "rocm-vllm", {}) == {}
