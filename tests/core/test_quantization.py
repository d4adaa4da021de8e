"""The choice of a build among the files of a repository."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.core.errors import Invalid
from enginehouse.core.quantization import (
    GgufChoice,
    RepositoryFile,
    choose_directory,
    choose_gguf,
    label_of,
    memory_needed,
)

GIB = 1024**3
FILES = [
    RepositoryFile("m-Q2_K.gguf", 3 * GIB),
    RepositoryFile("m-Q4_K_M.gguf", 5 * GIB),
    RepositoryFile("m-Q8_0.gguf", 9 * GIB),
    RepositoryFile("m-f16-00001-of-00002.gguf", 8 * GIB),
    RepositoryFile("m-f16-00002-of-00002.gguf", 8 * GIB),
    RepositoryFile("mmproj-m-f32.gguf", GIB),
    RepositoryFile("mmproj-m-f16.gguf", GIB),
    RepositoryFile("README.md", 10),
]


def chosen(memory: list[int], wanted: str = "", files: list[RepositoryFile] = FILES) -> GgufChoice:
    found = choose_gguf(files, memory, wanted=wanted, repository="o/r")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("dir/model.q8_0.gguf", "Q8_0"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("gemma-UD-IQ2_XXS.gguf", "IQ2_XXS"),
        ("gemma-UD-Q4_K_XL.gguf", "Q4_K_XL"),
        ("x-BF16-00001-of-00003.gguf", "BF16"),
        ("x-fp16.gguf", "F16"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("Q4-lover-IQ4_XS.gguf", "IQ4_XS"),
        ("plain.gguf", "plain"),
    ],
)
def test_the_name_of_a_file_tells_its_quantisation(path: str, label: str) -> None:
    assert label_of(path) == label


def test_the_middle_is_chosen_where_it_fits_and_the_rest_is_named() -> None:
    choice = chosen([2 * GIB, 64 * GIB])
    assert [file.path for file in choice.files] == ["m-Q4_K_M.gguf"]
    assert choice.projector is not None
    assert choice.projector.path == "mmproj-m-f16.gguf"
    for word in ("Q4_K_M", "64", "Q2_K", "Q8_0", "F16"):
        assert word in choice.reason


def test_less_memory_means_a_smaller_build_and_too_little_is_said() -> None:
    assert chosen([4 * GIB]).quantization == "Q2_K"
    assert "best of those that fit" in chosen([4 * GIB]).reason
    tight = chosen([GIB])
    assert (tight.quantization, tight.is_too_large) == ("Q2_K", True)
    assert "too large" in tight.reason
    assert "the memory of no node is known" in chosen([]).reason


def test_the_only_build_is_called_the_only_one() -> None:
    def reason(*memory: int) -> str:
        only = choose_gguf([RepositoryFile(path="o-Q4_K_M.gguf", size_bytes=4 * GIB)], memory)
        assert only is not None
        return only.reason

    beginning = "chose Q4_K_M (4.0 GiB): it is the only one"
    assert reason(64 * GIB) == f"{beginning}, and it fits a node with 64.0 GiB of free memory"
    assert reason(GIB) == f"{beginning}, and too large for a node with 1.0 GiB of free memory"
    assert reason() == f"{beginning}, and the memory of no node is known"


def test_the_parts_of_a_build_belong_together_and_an_incomplete_set_is_left_out() -> None:
    assert [file.path for file in chosen([], "f16").files] == [
        "m-f16-00001-of-00002.gguf",
        "m-f16-00002-of-00002.gguf",
    ]
    with pytest.raises(Invalid, match="it has Q2_K, Q4_K_M, Q8_0"):
        chosen([], "F16", [file for file in FILES if "00001" not in file.path])


def test_a_repository_without_a_model_gives_none() -> None:
    assert choose_gguf([RepositoryFile("README.md"), RepositoryFile("mmproj-f16.gguf")], []) is None


@given(st.lists(st.integers(1, 100), max_size=4))
def test_what_is_chosen_fits_whenever_something_does(memory: list[int]) -> None:
    choice = chosen([one * GIB for one in memory])
    best = max(memory, default=0) * GIB
    size = sum(file.size_bytes for file in choice.files)
    assert choice.is_too_large == bool(best and memory_needed(3 * GIB) > best)
    assert choice.is_too_large or not best or memory_needed(size) <= best


def test_a_directory_has_weights_and_small_files_and_no_second_copies() -> None:
    names = ["model.safetensors", "config.json", "pytorch_model.bin", ".gitattributes", "onnx/model.onnx", "sub/a.txt"]
    files = [RepositoryFile(name) for name in names]
    assert [one.path for one in choose_directory(files)] == ["model.safetensors", "config.json", "sub/a.txt"]
    assert [one.path for one in choose_directory(files, ["*.bin", "*.json"], ["conf*"])] == ["pytorch_model.bin"]
    assert choose_directory([RepositoryFile("config.json")]) == ()
