"""What a machine can run: from what was seen of it to the word, and from the word to the keys of a gallery."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.localai import localai, needs_index

from enginehouse.core import capability
from enginehouse.core.capability import (
    Facts,
    check_capability,
    decide,
    keys_for,
    preferred_words,
    too_new,
    why_unsuitable,
)
from enginehouse.core.errors import Invalid

GIB = 1024**3
AMD64, ARM64 = "linux/amd64", "linux/arm64"


@pytest.mark.parametrize(
    ("facts", "word", "told"),
    [
        (Facts(platform=AMD64), "default", "no graphics card"),
        (Facts(platform="darwin/arm64"), "metal", "darwin/arm64"),
        (Facts(platform="darwin/amd64", gpu_vendor="amd", total_vram=8 * GIB), "darwin-x86", "darwin/amd64"),
        (Facts(platform=AMD64, gpu_vendor="intel"), "default", "unknown amount"),
        (Facts(platform=AMD64, gpu_vendor="nvidia", total_vram=4 * GIB), "default", "4.0 GiB"),
        (Facts(platform=AMD64, gpu_vendor="nvidia", total_vram=4 * GIB + 1), "nvidia", "4.0 GiB"),
        (Facts(platform=AMD64, gpu_vendor="amd", total_vram=16 * GIB, cuda_toolkits=(13,)), "amd", "16.0 GiB"),
        (Facts(platform=AMD64, gpu_vendor="vulkan", total_vram=8 * GIB), "vulkan", "vulkan"),
        (
            Facts(platform=AMD64, gpu_vendor="nvidia", total_vram=8 * GIB, cuda_toolkits=(12, 13)),
            "nvidia-cuda-13",
            "/usr/local/cuda-13",
        ),
        (
            Facts(platform=AMD64, gpu_vendor="nvidia", total_vram=8 * GIB, cuda_toolkits=(12,), driver=580),
            "nvidia-cuda-12",
            "/usr/local/cuda-12",
        ),
        (Facts(platform=AMD64, gpu_vendor="nvidia", total_vram=8 * GIB, driver=580), "nvidia-cuda-13", "driver 580"),
        (Facts(platform=AMD64, gpu_vendor="nvidia", total_vram=8 * GIB, driver=579), "nvidia-cuda-12", "driver 579"),
        (Facts(platform=AMD64, gpu_vendor="nvidia", total_vram=8 * GIB, driver=470), "nvidia", "8.0 GiB"),
        (
            Facts(platform=AMD64, gpu_vendor="nvidia", total_vram=8 * GIB, cuda_toolkits=(13,), driver=550),
            "nvidia-cuda-12",
            "driver 550",
        ),
        (Facts(platform=ARM64, gpu_vendor="nvidia"), "nvidia-l4t", ARM64),
        (Facts(platform=ARM64, gpu_vendor="nvidia", cuda_toolkits=(12,)), "nvidia-l4t-cuda-12", "cuda-12"),
        (Facts(platform=ARM64, gpu_vendor="nvidia", cuda_toolkits=(13, 12)), "nvidia-l4t-cuda-13", "cuda-13"),
        (Facts(platform=ARM64, gpu_vendor="amd", total_vram=8 * GIB), "amd", "8.0 GiB"),
        (
            Facts(platform="darwin/arm64", forced="nvidia-l4t", forced_by="SOME_VARIABLE", gpu_vendor="amd"),
            "nvidia-l4t",
            "forced by SOME_VARIABLE",
        ),
    ],
)
def test_the_capability_follows_from_what_was_seen(facts: Facts, word: str, told: str) -> None:
    decision = decide(facts)
    assert decision.capability == word
    assert told in decision.reason


@given(
    st.builds(
        Facts,
        platform=st.sampled_from([AMD64, ARM64, "darwin/arm64", "darwin/amd64", "freebsd/amd64"]),
        gpu_vendor=st.sampled_from(["", "nvidia", "amd", "intel", "vulkan"]),
        total_vram=st.integers(0, 64 * GIB),
        cuda_toolkits=st.lists(st.sampled_from([11, 12, 13]), max_size=3).map(tuple),
        driver=st.integers(0, 700),
    )
)
def test_whatever_was_seen_the_word_is_one_that_galleries_know_and_a_cpu_build_always_remains(facts: Facts) -> None:
    decision = decide(facts)
    assert decision.reason
    family, _, cuda = decision.capability.partition("-cuda-")
    assert family in {"default", "nvidia", "nvidia-l4t", "amd", "intel", "vulkan", "metal", "darwin-x86"}
    assert cuda in {"", "12", "13"}
    if facts.driver and cuda:
        assert int(cuda) <= (13 if facts.driver >= 580 else 12)
    keys = keys_for(decision.capability)
    assert keys[-2:] == ("default", "cpu")
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("word", "keys"),
    [
        ("nvidia-cuda-13", "nvidia-cuda-13 nvidia default cpu"),
        ("nvidia-l4t-cuda-13", "nvidia-l4t-cuda-13 nvidia-l4t default cpu"),
        ("nvidia-l4t", "nvidia-l4t default cpu"),
        ("metal", "metal metal-darwin-arm64 default cpu"),
        ("amd", "amd default cpu"),
        ("default", "default cpu"),
        ("cpu", "cpu default"),
        ("disable", "default cpu"),
        ("something-new", "something-new default cpu"),
    ],
)
def test_the_keys_for_a_capability_go_from_the_special_to_the_general(word: str, keys: str) -> None:
    assert keys_for(word) == tuple(keys.split())


@pytest.mark.parametrize(
    ("word", "name", "uri", "needs"),
    [
        ("default", "cuda12-x", "quay.io/a/b:latest-gpu-nvidia-cuda-12-x", "NVIDIA graphics card"),
        ("default", "x", "quay.io/a/b:latest-gpu-rocm-hipblas-x", "AMD"),
        ("nvidia", "intel-sycl-f16-x", "", "Intel"),
        ("nvidia", "nvidia-l4t-arm64-x", "", "arm64"),
        ("nvidia-l4t-cuda-12", "cuda12-x", "", "NVIDIA graphics card"),
        ("default", "metal-x", "", "macOS"),
        ("default", "mlx", "", "macOS"),
        ("nvidia-cuda-12", "cuda12-x", "", ""),
        ("nvidia-l4t", "cuda13-nvidia-l4t-arm64-x", "", ""),
        ("default", "cpu-mlx", "quay.io/a/b:latest-cpu-mlx", ""),
        ("default", "vulkan-x", "", ""),
        ("default", "chip-x", "nvidia.example.org/metal/amd:latest", ""),
        ("disable", "cuda12-x", "", ""),
    ],
)
def test_a_build_that_obviously_cannot_run_says_what_it_needs(word: str, name: str, uri: str, needs: str) -> None:
    reason = why_unsuitable(word, name, uri)
    assert needs in reason
    assert bool(reason) is bool(needs)
    assert not reason or word in reason


def test_a_build_for_a_newer_cuda_than_the_machine_has_is_known_by_its_name_or_its_tag() -> None:
    assert "CUDA 13" in too_new("nvidia-cuda-12", "cuda13-x", "")
    assert "CUDA 13" in too_new("nvidia-l4t-cuda-12", "x", "quay.io/a/b:latest-nvidia-l4t-cuda-13-arm64-x")
    assert not too_new("nvidia-cuda-13", "cuda12-x", "")
    assert not too_new("nvidia", "cuda13-x", "")
    assert not too_new("nvidia-cuda-12", "cpu-x", "")


def test_of_several_builds_those_of_the_own_cuda_come_first() -> None:
    assert preferred_words("nvidia-cuda-13")[:2] == ("cuda13", "cuda")
    assert preferred_words("nvidia-l4t-cuda-12")[:2] == ("cuda12", "l4t")
    assert preferred_words("amd") == ("rocm", "hip", "vulkan", "cpu")
    assert preferred_words("default") == ("cpu",)


def _of_localai(word: str, name: str, uri: str) -> bool:
    """The filter of LocalAI as its fact sheet describes it: substrings, in this order."""
    text = f"{name} {uri}".lower()
    for substrings, allowed in (
        (("darwin", "mlx", "metal"), word in ("metal", "darwin-x86")),
        (("l4t",), word.startswith("nvidia-l4t")),
        (("cuda", "nvidia"), word.startswith("nvidia")),
        (("rocm", "hip", "amd"), word == "amd"),
        (("sycl", "intel"), word == "intel"),
    ):
        if any(one in text for one in substrings):
            return allowed
    return True


@needs_index
@pytest.mark.parametrize(
    "word", ["default", "nvidia", "nvidia-cuda-13", "nvidia-l4t", "amd", "intel", "vulkan", "metal"]
)
def test_the_filter_differs_from_localais_only_where_that_is_wrong(word: str) -> None:
    for entry in localai().backends:
        if not entry.uri or (not why_unsuitable(word, entry.name, entry.uri)) is _of_localai(
            word, entry.name, entry.uri
        ):
            continue
        is_mlx_elsewhere = "mlx" in entry.name and "metal" not in entry.name
        is_amd64_for_l4t = word.startswith("nvidia-l4t") and capability.cuda_of(entry.name) and "l4t" not in entry.name
        assert is_mlx_elsewhere or is_amd64_for_l4t, (entry.name, word)


@pytest.mark.parametrize(
    "word", ["default", "nvidia", "nvidia-cuda-12", "nvidia-l4t-cuda-13", "amd", "vulkan", "disable"]
)
def test_a_known_capability_is_accepted(word: str) -> None:
    assert check_capability(word) == word


@pytest.mark.parametrize("word", ["nvida", "cuda", "nvidia-cuda", "NVIDIA", "gpu", "nvidia-cuda-12x", ""])
def test_an_unknown_capability_is_refused_and_the_known_ones_are_named(word: str) -> None:
    with pytest.raises(Invalid, match=r"one of default, cpu, nvidia, .*, or of a CUDA release: nvidia-cuda-12"):
        check_capability(word)
