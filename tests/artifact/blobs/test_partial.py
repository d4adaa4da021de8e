"""Blobs on their way to disk: parts in any order, a journal that a kill or a power cut cannot fool."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worker.shelf import noise

from enginehouse.artifact.blobs import partial
from enginehouse.artifact.blobs.partial import Following, Partial, journal_of, journalled_bytes
from enginehouse.core.errors import Upstream

PART_BYTES = 64 * 1024
SIZE_BYTES = 5 * PART_BYTES + 1000
CONTENT = noise(SIZE_BYTES)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "PART_BYTES", PART_BYTES)


def opened(directory: Path) -> Partial:
    return Partial(directory / "blob.part", SIZE_BYTES)


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_what_was_written_is_there_after_a_kill(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.write(0, [CONTENT[:1000], CONTENT[1000:5000]])
    first.write(3 * PART_BYTES, [CONTENT[3 * PART_BYTES : 4 * PART_BYTES]])
    # Never closed: nothing is written at an end that a kill would skip.
    again = opened(tmp_path)
    assert again.written == [5000, 0, 0, PART_BYTES, 0, 0]
    assert again.missing() == [0, 1, 2, 4, 5]
    assert again.resumed_bytes == journalled_bytes(again.path, SIZE_BYTES) == 5000 + PART_BYTES
    again.close()
    first.close()


@given(
    st.lists(
        st.tuples(st.integers(0, SIZE_BYTES - 1), st.integers(1, 3 * PART_BYTES), st.integers(1, 50_000)), max_size=12
    )
)
@settings(max_examples=60, deadline=None)
def test_pieces_in_any_order_and_twice_never_put_a_byte_in_a_wrong_place(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, int, int]]
) -> None:
    made = opened(tmp_path_factory.mktemp("any"))
    for start, size, step in [*writes, (0, SIZE_BYTES, 30_000)]:
        content = CONTENT[start : start + size]
        made.write(start, [content[at : at + step] for at in range(0, len(content), step)])
    assert made.missing() == []
    assert made.path.read_bytes() == CONTENT
    made.close()


def test_thousands_of_small_pieces_are_written(tmp_path: Path) -> None:
    made = opened(tmp_path)
    made.write(0, [CONTENT[at : at + 10] for at in range(0, 40_000, 10)])
    assert made.written[0] == 40_000
    assert made.path.read_bytes() == CONTENT[:40_000]
    made.close()


@pytest.mark.parametrize(
    ("spoil", "kept"),
    [
        (lambda file, journal: journal.write_bytes(journal.read_bytes()[:17]), [PART_BYTES, 0]),
        (lambda file, journal: journal.write_bytes(b"\xff" * 24), [0, 0]),
        (lambda file, journal: journal.write_bytes(b"\0" * 24), [0, 0]),
        (lambda file, journal: journal.unlink(), [0, 0]),
        (lambda file, journal: _flip(file, 70_000), [PART_BYTES, 0]),
        (lambda file, journal: os.truncate(file, PART_BYTES + 10), [PART_BYTES, 0]),
        (lambda file, journal: file.write_bytes(noise(SIZE_BYTES, 9)), [0, 0]),
        (lambda file, journal: file.write_bytes(file.read_bytes() + noise(SIZE_BYTES, 9)), [PART_BYTES, PART_BYTES]),
        (lambda file, journal: _swap_records(journal), [0, 0]),
    ],
)
def test_what_a_power_cut_tore_is_not_trusted(tmp_path: Path, spoil: object, kept: list[int]) -> None:
    made = opened(tmp_path)
    made.write(0, [CONTENT[: 2 * PART_BYTES]])
    made.close()
    assert callable(spoil)
    spoil(made.path, journal_of(made.path))
    again = opened(tmp_path)
    assert again.written[:2] == kept
    again.write(0, [CONTENT])
    assert again.path.read_bytes() == CONTENT
    again.close()


def _swap_records(journal: Path) -> None:
    content = journal.read_bytes()
    journal.write_bytes(content[12:24] + content[:12])


def test_a_reader_gets_what_is_there_up_to_the_first_hole_and_hears_of_failures(tmp_path: Path) -> None:
    made = opened(tmp_path)
    following = Following(made.path, 0, SIZE_BYTES)
    made.write(PART_BYTES, [CONTENT[PART_BYTES : 2 * PART_BYTES]])
    following.follow(made)
    made.write(0, [CONTENT[:100]])
    following.follow(made)
    assert following.read(1000) == CONTENT[:100]
    made.write(100, [CONTENT[100:PART_BYTES]])
    following.follow(made)
    assert following.read() == CONTENT[100 : 2 * PART_BYTES]
    following.fail(Upstream("cannot go on", code="stalled"))
    with pytest.raises(Upstream):
        following.read(10)
    following.close()
    made.close()
