"""Bytes of layers through everything that happens to them on the way."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.fetch.faults import (
    Answer,
    Cut,
    Drop,
    Extra,
    Fault,
    Flip,
    Header,
    IgnoreRange,
    Redirect,
    Short,
    Stall,
    WrongLength,
    WrongRange,
)
from tests.fetch.faulty import faulty
from tests.fetch.images import digest_of
from tests.fetch.pulling import STALL_SECONDS, Pull, read_all

from enginehouse.core.artifact import Layer
from enginehouse.core.errors import EnginehouseError, NotFound, Upstream
from enginehouse.fetch.origins import Origin


async def opened(pull: Pull) -> tuple[Origin, Layer, bytes]:
    """An origin, its large layer, and the bytes that this layer has."""
    origin = pull.origin()
    layer = (await origin.resolve("linux/amd64")).layers[1]
    stored = pull.image.directory / "blobs" / layer.digest.replace(":", "/")
    return origin, layer, stored.read_bytes()


async def read_until_it_breaks(
    origin: Origin, layer: Layer, start: int, end: int | None
) -> tuple[bytes, EnginehouseError]:
    got = bytearray()
    try:
        async for piece in origin.read(layer, start, end):
            got += piece
    except EnginehouseError as error:
        return bytes(got), error
    raise AssertionError("it did not break")


async def test_a_layer_is_read_whole_and_in_parts(pull: Pull) -> None:
    origin, layer, content = await opened(pull)
    assert await read_all(origin, layer) == content
    size = layer.size_bytes
    for start, end in (
        (0, 1),
        (1, 2),
        (5, 100_000),
        (size - 1, None),
        (100, size),
        (0, size + 50),
        (7, 7),
        (size, None),
    ):
        assert await read_all(origin, layer, start, end) == content[start:end]
    assert origin.supports_ranges
    assert origin.local(layer) is None


async def test_ranges_side_by_side_are_the_layer(pull: Pull) -> None:
    origin, layer, content = await opened(pull)
    parts: dict[int, bytes] = {}

    async def read(start: int) -> None:
        parts[start] = await read_all(origin, layer, start, start + 100_000)

    async with asyncio.TaskGroup() as group:
        for start in range(0, layer.size_bytes, 100_000):
            group.create_task(read(start))
    assert b"".join(parts[start] for start in sorted(parts)) == content


@pytest.mark.parametrize("fault", [Cut(50_000), Cut(0), Short(1000)])
async def test_what_arrived_before_a_cut_is_kept_and_the_rest_is_had_by_a_range(pull: Pull, fault: Fault) -> None:
    origin, layer, content = await opened(pull)
    pull.proxy.plan(fault, path=layer.digest)
    got, error = await read_until_it_breaks(origin, layer, 0, None)
    assert (type(error), error.code) == (Upstream, "upstream_error")
    assert content.startswith(got)
    assert got + await read_all(origin, layer, len(got)) == content
    assert pull.proxy.bytes_sent(layer.digest) <= layer.size_bytes + 50_000


@pytest.mark.parametrize(
    ("fault", "start", "end"),
    [
        (Extra(10), 0, None),
        (Extra(10), 100, 1000),
        (WrongLength(-10), 100, 1000),
        (WrongLength(10), 0, None),
        (WrongRange(1), 100, 1000),
        (Header("content-range", "bytes 100-999/5"), 100, 1000),
        (Header("content-range", "nonsense"), 100, 1000),
        (Header("content-range"), 100, 1000),
        (Header("content-encoding", "gzip"), 0, None),
        (Drop(), 0, None),
    ],
)
async def test_never_more_and_never_other_bytes_than_asked_for(
    pull: Pull, fault: Fault, start: int, end: int | None
) -> None:
    origin, layer, content = await opened(pull)
    pull.proxy.plan(fault, path=layer.digest, times=2)
    got, error = await read_until_it_breaks(origin, layer, start, end)
    assert isinstance(error, Upstream)
    # What can be told from the head is told before anything of the body is used.
    assert got == (content[start:end][: len(got)] if fault == WrongLength(-10) else b"")
    pull.proxy.forget_plans()
    assert await read_all(origin, layer, start, end) == content[start:end]


async def test_a_body_without_a_length_is_counted(pull: Pull) -> None:
    origin, layer, content = await opened(pull)
    for extra in (b"", b"more"):
        pull.proxy.plan(Answer(200, content + extra, {"Content-Length": ""}), path=layer.digest)
        pull.proxy.plan(Cut(len(content + extra)), path=layer.digest)
        if not extra:
            assert await read_all(origin, layer) == content
    got, error = await read_until_it_breaks(origin, layer, 0, None)
    assert got == content
    assert isinstance(error, Upstream)


async def test_a_wrong_byte_is_left_to_whoever_hashes(pull: Pull) -> None:
    origin, layer, content = await opened(pull)
    pull.proxy.plan(Flip(123_456), path=layer.digest, times=None)
    spoilt = await read_all(origin, layer, 0, 100_000) + await read_all(origin, layer, 100_000)
    assert len(spoilt) == len(content)
    assert digest_of(spoilt) != layer.digest


async def test_a_server_without_ranges_gives_the_beginning_and_says_so_for_the_rest(pull: Pull) -> None:
    origin, layer, content = await opened(pull)
    pull.proxy.plan(IgnoreRange(), path=layer.digest, times=None)
    assert await read_all(origin, layer, 0, 1000) == content[:1000]
    assert not origin.supports_ranges
    asked = len(pull.proxy.requests)
    got, error = await read_until_it_breaks(origin, layer, 1000, 2000)
    assert (got, error.code) == (b"", "no_ranges")
    assert len(pull.proxy.requests) == asked
    assert await read_all(origin, layer) == content


async def test_a_range_answered_with_the_whole_yields_nothing_of_it(pull: Pull) -> None:
    origin, layer, _ = await opened(pull)
    pull.proxy.plan(IgnoreRange(), path=layer.digest)
    got, error = await read_until_it_breaks(origin, layer, 1000, None)
    assert (got, type(error), error.code) == (b"", Upstream, "no_ranges")
    assert not origin.supports_ranges


async def test_silence_in_the_middle_is_a_stall(pull: Pull) -> None:
    """F-005."""
    origin, layer, content = await opened(pull)
    pull.proxy.plan(Stall(10_000), path=layer.digest)
    began = time.monotonic()
    got, error = await read_until_it_breaks(origin, layer, 0, None)
    assert (got, error.code) == (content[:10_000], "stalled")
    assert time.monotonic() - began >= STALL_SECONDS
    assert got + await read_all(origin, layer, len(got)) == content


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_busy_server_is_told_with_its_waiting_time_and_not_asked_again(pull: Pull, status: int) -> None:
    origin, layer, _ = await opened(pull)
    pull.proxy.plan(Answer(status, headers={"Retry-After": "9"}), path=layer.digest)
    _, error = await read_until_it_breaks(origin, layer, 0, None)
    assert (type(error), error.retry_after_seconds) == (Upstream, 9)
    assert len(pull.proxy.asked(layer.digest)) == 1


async def test_a_missing_blob_cannot_heal(pull: Pull) -> None:
    origin, _, _ = await opened(pull)
    _, error = await read_until_it_breaks(
        origin, Layer(digest="sha256:" + "0" * 64, size_bytes=10, compression="none"), 0, None
    )
    assert (type(error), error.code) == (NotFound, "not_found")


async def test_a_blob_that_lies_elsewhere_is_asked_for_there_until_that_address_is_over(pull: Pull) -> None:
    origin, layer, content = await opened(pull)
    async with faulty() as store:
        path = "/signed/blob"
        store.files[path] = content
        pull.proxy.plan(Redirect(f"{store.url}{path}?signature=1"), path=layer.digest, times=None)
        for start in (0, 1000, 2000):
            assert await read_all(origin, layer, start, start + 1000) == content[start : start + 1000]
        assert (len(pull.proxy.asked(layer.digest)), len(store.requests)) == (1, 3)
        for status in (403, 410, 400):
            store.plan(Answer(status))
            assert await read_all(origin, layer, 5, 10) == content[5:10]
        assert len(pull.proxy.asked(layer.digest)) == 4
        store.plan(Answer(503))
        _, error = await read_until_it_breaks(origin, layer, 5, 10)
        assert isinstance(error, Upstream)
        assert "signature" not in error.message


async def test_leaving_a_layer_early_ends_its_transfer(pull: Pull) -> None:
    origin, layer, _ = await opened(pull)
    pull.proxy.bytes_per_second = 200_000.0
    reading = origin.read(layer, 0, None).__aiter__()
    await anext(reading)
    await reading.aclose()  # type: ignore[attr-defined]
    pull.proxy.bytes_per_second = None
    await pull.origin().resolve("linux/amd64")
    assert pull.proxy.bytes_sent(layer.digest) < layer.size_bytes
