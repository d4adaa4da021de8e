"""Directories of backends: their names, their metadata, and what a listing says of them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.core.backend import find
from enginehouse.core.errors import Invalid
from enginehouse.core.installation import (
    SUFFIXES,
    Found,
    Metadata,
    check_directory,
    decode_metadata,
    directory_behind,
    encode_metadata,
    listing,
    target_of,
)

names = st.from_regex(r"[a-z][a-z0-9.-]{0,10}[a-z0-9]", fullmatch=True)


def found(name: str, metadata: Metadata | bytes | None, has_run_file: bool = True) -> Found:
    content = encode_metadata(metadata) if isinstance(metadata, Metadata) else metadata
    return Found(name=name, metadata=content, has_run_file=has_run_file)


def test_metadata_has_the_keys_and_the_form_of_localai() -> None:
    content = encode_metadata(Metadata(name="a", digest="sha256:1", generation=3))
    assert content == b'{\n  "name": "a",\n  "digest": "sha256:1",\n  "generation": 3\n}\n'


@given(st.text(), st.text(), st.integers(min_value=0, max_value=2**53))
def test_metadata_survives_the_disk(name: str, version: str, generation: int) -> None:
    metadata = Metadata(name=name, version=version, generation=generation)
    assert decode_metadata(encode_metadata(metadata)) == metadata


@given(st.binary(max_size=60))
def test_no_bytes_upset_the_reader(content: bytes) -> None:
    read = decode_metadata(content)
    assert read is None or isinstance(read, Metadata)
    listing([found("a", content), found("b", content, has_run_file=False)])


def test_unknown_keys_of_another_version_are_ignored() -> None:
    assert decode_metadata(b'{"name": "a", "future": [1]}') == Metadata(name="a")


@given(names, st.sampled_from(SUFFIXES))
def test_a_directory_of_a_replacement_is_never_a_backend(name: str, suffix: str) -> None:
    with pytest.raises(Invalid):
        check_directory(name + suffix)
    belongs = target_of(name + suffix)
    assert belongs is not None
    assert belongs[0] + belongs[1] == name + suffix
    assert listing([found(name + suffix, Metadata())]) == ()


def test_a_suffix_alone_is_no_replacement() -> None:
    assert target_of(".backup") is None
    assert target_of("plain") is None


def test_a_listing_tells_whole_broken_and_meta_apart() -> None:
    listed = listing(
        [
            found("whole", Metadata(name="whole", digest="d", generation=2)),
            found("localai", None),
            found("no-run-file", Metadata(name="x"), has_run_file=False),
            found("bad-metadata", b"{"),
            found("unreadable", b""),
            found("empty", None, has_run_file=False),
            found("meta", Metadata(name="meta", meta_backend_for="whole"), has_run_file=False),
            found("orphan", Metadata(name="orphan", meta_backend_for="gone"), has_run_file=False),
        ]
    )
    assert {backend.name: (backend.is_meta, backend.is_broken) for backend in listed} == {
        "bad-metadata": (False, True),
        "localai": (False, False),
        "meta": (True, False),
        "no-run-file": (False, True),
        "orphan": (True, True),
        "unreadable": (False, True),
        "whole": (False, False),
    }
    assert find(listed, "meta") == next(backend for backend in listed if backend.name == "whole")
    assert find(listed, "orphan") is None
    assert directory_behind(listed, "meta") == "whole"
    assert directory_behind(listed, "whole") == "whole"
    assert directory_behind(listed, "absent") is None


def test_the_listing_is_what_goes_on_the_wire() -> None:
    (backend,) = listing([found("a", Metadata(name="a", version="1"))])
    assert msgspec.json.decode(msgspec.json.encode(backend)) == {
        "name": "a",
        "is_system": False,
        "is_meta": False,
        "version": "1",
    }
