"""What an engine is told about its model and this machine: context, layers on the graphics cards, requests at once.

Reads the header of the model's file and the free memory of the cards; `core.offload` decides. All functions block. A
file or card that cannot be read is unknown, which is never a reason not to start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from enginehouse.core.demand import cache_bytes_of
from enginehouse.core.errors import Invalid
from enginehouse.core.gguf import PREFIX_BYTES, GgufHeader, is_gguf, read_gguf
from enginehouse.core.model import Model, parallel_requests, served_config
from enginehouse.core.model_definition import MAX_CONTEXT
from enginehouse.core.offload import ReplicaSize, is_on_one_card, known_cards, plan_offload
from enginehouse.host import hardware

log = logging.getLogger(__name__)

VISIBLE_CARDS = "CUDA_VISIBLE_DEVICES"


class Fitting(Struct, frozen=True, kw_only=True):
    context_size: int  # 0 leaves it to the engine
    gpu_layers: int
    parallel: int  # 0 leaves it to the engine


def fit(model: Model, model_path: Path | None, directory: str) -> Fitting:
    """What suits this machine, where the model's configuration says nothing. `directory` is that of the engine."""
    header = read_header(model, model_path)
    # What the file was trained on, at most LocalAI's limit.
    recommended = min(header.context_length, MAX_CONTEXT) if header is not None else 0
    context = model.options.context_size or recommended
    size = ReplicaSize(
        weights_bytes=model.size_bytes,
        layers=header.block_count if header is not None else 0,
        cache_bytes=cache_bytes_of(model, context, header.cache_bytes_per_token if header is not None else 0),
        gpu_layers=served_config(model).gpu_layers,
        parallel=parallel_requests(model),
    )
    found = plan_offload(size, hardware.graphics_capacity(), directory, has_card=hardware.has_card())
    log.debug("engine.fitted model=%s gpu_layers=%d parallel=%d", model.name, found.gpu_layers, found.parallel)
    return Fitting(context_size=context, gpu_layers=found.gpu_layers, parallel=found.parallel)


def card_variables(model: Model, directory: str, given: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep an engine on the card with the most free memory, where it uses one card only and there
    are several. Without them it would take the first one, whatever is free there. What the worker was started with, and
    what the model's configuration says (`main_gpu`), wins.
    """
    capacity, config = hardware.graphics_capacity(), served_config(model)
    cards = known_cards(capacity)
    if capacity.gpu_vendor != "nvidia" or len(cards) < 2 or VISIBLE_CARDS in given or config.main_gpu:
        return {}
    if not is_on_one_card(model, directory, capacity.gpu_vendor):
        return {}
    best = max(cards, key=lambda card: card.available_vram or 0)
    # The tool that counted the cards counts by their place on the bus; the engine would count by their speed.
    return {VISIBLE_CARDS: str(best.index), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def read_header(model: Model, model_path: Path | None) -> GgufHeader | None:
    """The header of the model's file; None if it has none, or one that cannot be read."""
    if model_path is None:
        return None
    try:
        with model_path.open("rb") as file:
            head, size_bytes = file.read(PREFIX_BYTES), os.fstat(file.fileno()).st_size
        return read_gguf(head, size_bytes) if is_gguf(head) else None
    except (OSError, Invalid) as error:
        log.warning("model.header_unreadable model=%s error=%s", model.name, error)
        return None
