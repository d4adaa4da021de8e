"""Threads: a share that gets smaller, and never nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.core.threads import AssignedThreads, is_for_card, share


@pytest.mark.parametrize(
    ("cores", "wanted", "assigned", "threads"),
    [
        (8, 0, AssignedThreads(), 4),
        (8, 0, AssignedThreads(4, 1), 4),
        (8, 0, AssignedThreads(8, 2), 2),
        (8, 0, AssignedThreads(10, 3), 2),
        (8, 6, AssignedThreads(), 6),
        (8, 6, AssignedThreads(4, 1), 4),
        (8, 64, AssignedThreads(), 8),
        (2, 0, AssignedThreads(1, 1), 1),
        (2, 0, AssignedThreads(2, 2), 1),
        (1, 0, AssignedThreads(50, 50), 1),
        # Engines on a card leave the cores to the others.
        (8, 0, AssignedThreads(3, 3), 4),
    ],
)
def test_a_share(cores: int, wanted: int, assigned: AssignedThreads, threads: int) -> None:
    assert share(cores, wanted, assigned) == threads


@given(st.integers(1, 256), st.integers(0, 512), st.integers(0, 10_000), st.integers(0, 1000))
def test_nobody_is_refused_or_gets_more_than_there_is(cores: int, wanted: int, threads: int, engines: int) -> None:
    got = share(cores, wanted, AssignedThreads(threads, engines))
    assert 1 <= got <= cores
    assert got >= share(cores, wanted, AssignedThreads(threads + 1, engines + 1))


@pytest.mark.parametrize(
    ("directory", "vendor", "expected"),
    [
        ("cuda12-llama-cpp", "nvidia", True),
        ("rocm-vllm", "amd", True),
        ("intel-sycl-f16-llama-cpp", "intel", True),
        ("nvidia-l4t-arm64-llama-cpp", "nvidia", True),
        ("lab.vulkan-llama-cpp", "amd", True),
        ("cuda12-llama-cpp", "", False),
        ("cpu-llama-cpp", "nvidia", False),
        ("xllamacpp", "nvidia", False),
        ("whisper", "amd", False),
    ],
)
def test_an_engine_on_a_card_is_known_by_its_name(directory: str, vendor: str, expected: bool) -> None:
    assert is_for_card(directory, vendor) is expected
