"""Headers of GGUF files: read, or refused with one sentence and bounded work."""

from __future__ import annotations

import contextlib
import struct
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.gguf_files import LLAMA, TENSORS, gguf, text

from enginehouse.core.errors import Invalid
from enginehouse.core.gguf import PREFIX_BYTES, GgufHeader, about_architecture, read_gguf

WHOLE = gguf(LLAMA, TENSORS)
HEADER_BYTES = len(gguf(LLAMA)) + sum(len(text(name)) + 4 + 16 + 12 for name, _ in TENSORS)
ONE_PAIR = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k")


def test_a_header_says_what_the_model_is() -> None:
    assert read_gguf(WHOLE) == GgufHeader(
        version=3,
        architecture="llama",
        name="Tiny",
        license="mit",
        quantization="Q4_K_M",
        context_length=4096,
        block_count=2,
        embedding_length=64,
        head_count=8,
        head_count_kv=2,
        parameter_count=2 * 64 * 3,
        has_chat_template=True,
    )


def test_the_shipped_model_is_read_from_its_first_bytes() -> None:
    shipped = resources.files("enginehouse").joinpath("gallery").joinpath("tiny-chat-2m-q8_0.gguf").read_bytes()
    header = read_gguf(shipped[:PREFIX_BYTES], 0)
    assert (header.architecture, header.quantization) == ("llama", "Q8_0")
    assert header.context_length == 512
    assert read_gguf(shipped).parameter_count > 1_000_000


@pytest.mark.parametrize(
    ("pairs", "kind"),
    [
        ({"general.architecture": "bert", "bert.pooling_type": 1}, "is_embedding"),
        ({"general.architecture": "nomic-bert"}, "is_embedding"),
        ({"general.architecture": "bert", "bert.pooling_type": 4}, "is_reranker"),
        ({"general.architecture": "clip"}, "is_projector"),
        ({"general.architecture": "x", "general.type": "mmproj"}, "is_projector"),
    ],
)
def test_embeddings_rerankers_and_projectors_are_told_apart(pairs: dict[str, object], kind: str) -> None:
    header = read_gguf(gguf(pairs))
    found = {name for name in ("is_embedding", "is_reranker", "is_projector") if getattr(header, name)}
    assert found == {kind}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "does not begin like one"),
        (b"<html>not here</html>", "does not begin like one"),
        (b"GGUF", "cut off after 4 bytes"),
        (WHOLE[:60], "cut off after 60 bytes"),
        (WHOLE[: HEADER_BYTES - 1], "cut off"),
        (WHOLE[:HEADER_BYTES], f"it has {HEADER_BYTES} bytes of at least {len(WHOLE)}"),
        (WHOLE[:-1], f"it has {len(WHOLE) - 1} bytes of at least {len(WHOLE)}"),
        (gguf(LLAMA, version=1), "version is 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "other byte order"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "claims"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "a text in it has"),
        (ONE_PAIR + struct.pack("<I", 99), "unknown type 99"),
        (ONE_PAIR + struct.pack("<IIQ", 9, 77, 1), "unknown type 77"),
        (
            ONE_PAIR + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9,
            "nested too deep",
        ),
        (gguf({"general.name": "x"}), "architecture"),
        (gguf(LLAMA, [("t", (1, 1, 1, 1, 1))]), "5 dimensions"),
    ],
)
def test_what_makes_no_sense_is_refused_with_one_sentence(content: bytes, why: str) -> None:
    with pytest.raises(Invalid) as caught:
        read_gguf(content)
    assert why in caught.value.message
    assert caught.value.message.startswith("cannot read the file as GGUF")


def test_a_file_is_cut_off_if_it_ends_within_its_tensors() -> None:
    beginning = WHOLE[:HEADER_BYTES]
    assert read_gguf(beginning, len(WHOLE)).is_complete
    assert read_gguf(beginning, 0).is_complete, "nobody knows how long it is"
    with pytest.raises(Invalid, match="cut off"):
        read_gguf(beginning, len(WHOLE) - 1)
    shipped = resources.files("enginehouse").joinpath("gallery").joinpath("tiny-chat-2m-q8_0.gguf").read_bytes()
    with pytest.raises(Invalid, match=f"it has {len(shipped) - 1} bytes of at least {len(shipped)}"):
        read_gguf(shipped[:-1])


def test_an_array_that_claims_more_than_there_is_ends_at_once() -> None:
    claimed = ONE_PAIR + struct.pack("<IIQ", 9, 8, 2**63)
    header = read_gguf(claimed, 0)
    assert not header.is_complete


@given(st.integers(24, len(WHOLE)))
def test_every_beginning_of_a_file_is_read_as_far_as_it_goes(length: int) -> None:
    header = read_gguf(WHOLE[:length], 0)
    assert header.is_complete == (length >= HEADER_BYTES)


@given(st.binary(max_size=300), st.integers(0, len(WHOLE)))
def test_damaged_bytes_are_refused_and_never_crash(noise: bytes, position: int) -> None:
    damaged = b"GGUF" + (WHOLE[:position] + noise + WHOLE[position + len(noise) :])[4:]
    with contextlib.suppress(Invalid):
        assert read_gguf(damaged).version in (2, 3)


def test_an_unknown_architecture_is_a_remark_and_not_a_refusal() -> None:
    assert about_architecture(read_gguf(WHOLE)) == ""
    assert "'quokka' is not known" in about_architecture(read_gguf(gguf({"general.architecture": "quokka"})))
