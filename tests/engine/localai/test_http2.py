"""What no real server does: frames cut anywhere, broken frames, windows overrun, ends in the middle."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.localai.scripted import END, HEAD, Peer, data, frame, head, rest_of, staged, trailers, until

from enginehouse.core.errors import EnginehouseError, Unavailable, Upstream
from enginehouse.engine.localai import frames, hpack, http2, status
from enginehouse.engine.localai.http2 import Http2Connection
from enginehouse.engine.localai.stream import WINDOW_BYTES, GrpcStream, framed

number = struct.Struct(">I").pack


@pytest.fixture(params=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


async def test_a_call_is_answered() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        for stream in (1, 3):
            assert await peer.take_call() == stream
            peer.send(head(stream), data(b"one", stream=stream), data(b"two", b"", stream=stream), trailers(stream))

    async with staged(script) as stage:
        assert await stage.ask() == [b"one", b"two", b""]
        assert await stage.ask() == [b"one", b"two", b""]
        assert stage.connections == 1


# Broken frames ------------------------------------------------------------------------------------------------------

PADDED, WHOLE = frames.PADDED, frames.END_HEADERS
BROKEN = {
    "a frame larger than allowed": (frames.FRAME_SIZE_ERROR, frame(frames.DATA, 0, 1, bytes(16_385))),
    "a large frame that looks like one message": (frames.FRAME_SIZE_ERROR, data(bytes(16_380))),
    "a message on stream 0": (frames.PROTOCOL_ERROR, data(b"x", stream=0)),
    "a message on an even stream": (frames.PROTOCOL_ERROR, data(b"x", stream=2)),
    "a message on a stream that was never opened": (frames.PROTOCOL_ERROR, data(b"x", stream=5)),
    "a head on a stream that was never opened": (frames.PROTOCOL_ERROR, head(7)),
    "padding longer than its frame": (frames.PROTOCOL_ERROR, frame(frames.DATA, PADDED, 1, b"\x05abcd")),
    "padding of an empty frame": (frames.PROTOCOL_ERROR, frame(frames.DATA, PADDED, 1)),
    "a priority that is cut short": (frames.FRAME_SIZE_ERROR, frame(frames.HEADERS, 0x20 | WHOLE, 1, b"abc")),
    "settings of the wrong size": (frames.FRAME_SIZE_ERROR, frame(frames.SETTINGS, 0, 0, bytes(5))),
    "settings on a stream": (frames.PROTOCOL_ERROR, frame(frames.SETTINGS, 0, 1)),
    "an acknowledgement with content": (frames.FRAME_SIZE_ERROR, frame(frames.SETTINGS, 1, 0, bytes(6))),
    "push enabled by a server": (frames.PROTOCOL_ERROR, frames.settings({frames.ENABLE_PUSH: 1})),
    "a frame size below the least": (frames.PROTOCOL_ERROR, frames.settings({frames.MAX_FRAME_SIZE: 16_383})),
    "a frame size above the largest": (frames.PROTOCOL_ERROR, frames.settings({frames.MAX_FRAME_SIZE: 2**24})),
    "an initial window above the largest": (
        frames.FLOW_CONTROL_ERROR,
        frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31}),
    ),
    "a window above the largest by settings": (
        frames.FLOW_CONTROL_ERROR,
        frames.window_update(1, 2**30) + frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31 - 1}),
    ),
    "a connection window above the largest": (frames.FLOW_CONTROL_ERROR, frames.window_update(0, 2**31 - 1)),
    "a credit of nothing": (frames.PROTOCOL_ERROR, frames.window_update(0, 0)),
    "a credit of the wrong size": (frames.FRAME_SIZE_ERROR, frame(frames.WINDOW_UPDATE, 0, 0, bytes(3))),
    "a credit on a stream that was never opened": (frames.PROTOCOL_ERROR, frames.window_update(9, 1)),
    "a ping of the wrong size": (frames.FRAME_SIZE_ERROR, frame(frames.PING, 0, 0, bytes(7))),
    "a ping on a stream": (frames.PROTOCOL_ERROR, frame(frames.PING, 0, 1, bytes(8))),
    "a reset of the wrong size": (frames.FRAME_SIZE_ERROR, frame(frames.RST_STREAM, 0, 1, bytes(3))),
    "a reset of a stream that was never opened": (frames.PROTOCOL_ERROR, frames.reset(3, 0)),
    "a goaway that is cut short": (frames.FRAME_SIZE_ERROR, frame(frames.GOAWAY, 0, 0, bytes(7))),
    "a goaway on a stream": (frames.PROTOCOL_ERROR, frame(frames.GOAWAY, 0, 1, bytes(8))),
    "a push": (frames.PROTOCOL_ERROR, frame(frames.PUSH_PROMISE, WHOLE, 1, number(2) + HEAD)),
    "a continuation of nothing": (frames.PROTOCOL_ERROR, frame(frames.CONTINUATION, WHOLE, 1, HEAD)),
    "a message inside a header block": (
        frames.PROTOCOL_ERROR,
        frame(frames.HEADERS, 0, 1, HEAD[:3]) + data(b"abc"),
    ),
    "another stream inside a header block": (
        frames.PROTOCOL_ERROR,
        frame(frames.HEADERS, 0, 1, HEAD[:3]) + frame(frames.CONTINUATION, WHOLE, 3, HEAD[3:]),
    ),
    "headers with the index 0": (frames.COMPRESSION_ERROR, head(1, b"\x80")),
    "headers with an endless number": (frames.COMPRESSION_ERROR, head(1, b"\xff" * 12)),
    "continuations without end": (
        frames.ENHANCE_YOUR_CALM,
        frame(frames.HEADERS, 0, 1, HEAD) + frame(frames.CONTINUATION, 0, 1) * 33,
    ),
    "headers without end": (
        frames.ENHANCE_YOUR_CALM,
        frame(frames.HEADERS, 0, 1, bytes(16_384)) + frame(frames.CONTINUATION, 0, 1, bytes(16_384)) * 16,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("has_head", [False, True])
async def test_a_broken_frame_ends_the_connection(name: str, has_head: bool) -> None:
    code, broken = BROKEN[name]
    told = asyncio.get_running_loop().create_future()

    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.take_call()
        peer.send(head() + data(b"before") if has_head else b"", broken)
        told.set_result(await peer.told_code())

    async with staged(script) as stage:
        stream = await stage.start()
        if has_head:
            assert await stream.next_messages() == [b"before"]
        with pytest.raises(Upstream) as caught:
            await stream.next_messages()
        assert caught.value.code == "upstream_error"
        assert await told == code
        assert stage.client.connections_to(stage.address) == []


@pytest.mark.parametrize("first", [b"HTTP/1.1 400 Bad Request\r\n\r\n", head(), frames.ping_ack(bytes(8)), b""])
async def test_a_peer_that_does_not_greet_was_sent_nothing(first: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.reader.readexactly(len(frames.PREFACE))
        peer.send(first)
        if first:
            await peer.until_closed()

    async with staged(script) as stage:
        with pytest.raises(Unavailable) as caught:
            await stage.start()
        assert caught.value.code == "replica_unreachable"


async def test_a_peer_that_is_silent_is_unreachable_after_the_limit() -> None:
    """For all that wait: a connection without a greeting takes no calls."""
    async with staged(Peer.until_closed) as stage:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(caught_by(stage.start(connect_seconds=0.2)))
            await until(lambda: bool(stage.client.connections_to(stage.address)))
            second = group.create_task(caught_by(stage.start(connect_seconds=0.1)))
        for task in (first, second):
            error = task.result()
            assert isinstance(error, Unavailable)
            assert error.code == "replica_unreachable"
        assert stage.client.connections_to(stage.address) == []


async def caught_by(starting: Awaitable[GrpcStream]) -> BaseException | None:
    try:
        await starting
    except EnginehouseError as error:
        return error
    return None


# Ends ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", range(0, 60, 5))
async def test_an_engine_that_dies_inside_a_frame_fails_the_call(kept: int) -> None:
    whole = head() + data(b"x" * 200)

    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.take_call()
        peer.send(whole[:kept])

    async with staged(script) as stage:
        with pytest.raises(Upstream) as caught:
            await stage.ask()
        assert caught.value.code == "upstream_error"
        assert "ended before" in caught.value.message


LARGE_ENTRY = b"\x40" + hpack.encode([(b"n", bytes(3900))])[1:]  # put into the table, where one byte stands for it
ANSWERS = {
    "no trailers": (None, head() + data(b"x", flags=frames.END_STREAM)),
    "an end inside a message": (None, head() + frame(frames.DATA, 0, 1, framed(b"hello")[:7]) + trailers()),
    "an end inside a prefix": (None, head() + frame(frames.DATA, 0, 1, b"\0\0") + trailers()),
    "trailers without a status": (None, head() + trailers(1, hpack.encode([(b"x", b"y")]))),
    "a status that is no number": (None, head() + trailers(1, hpack.encode([(b"grpc-status", b"-1")]))),
    "no content type": (None, head(1, hpack.encode([(b":status", b"200")]))),
    "a page": (None, head(1, hpack.encode([(b":status", b"200"), (b"content-type", b"text/html")]))),
    "no HTTP status": (None, head(1, hpack.encode([(b"content-type", b"application/grpc")]))),
    "HTTP status 503": (status.UNAVAILABLE, head(1, hpack.encode([(b":status", b"503")]))),
    "HTTP status 404 at once": (status.UNIMPLEMENTED, trailers(1, hpack.encode([(b":status", b"404")]))),
    "HTTP status 418": (status.UNKNOWN, head(1, hpack.encode([(b":status", b"418")]))),
    "a status beside HTTP 500": (3, trailers(1, hpack.encode([(b":status", b"500"), (b"grpc-status", b"3")]))),
    "a status nobody knows": (99, trailers(1, hpack.encode([(b":status", b"200"), (b"grpc-status", b"99")]))),
    "messages before the head": (None, data(b"x")),
    "headers among messages": (None, head() + head()),
    "a message that is compressed": (None, head() + frame(frames.DATA, 0, 1, b"\x01\0\0\0\x01x")),
    "a message that is too large": (status.RESOURCE_EXHAUSTED, head() + frame(frames.DATA, 0, 1, b"\0\xff\0\0\0")),
    "the same, prefix in two": (
        status.RESOURCE_EXHAUSTED,
        head() + frame(frames.DATA, 0, 1, b"\0\xff") + frame(frames.DATA, 0, 1, b"\0\0\0"),
    ),
    "a reset": (None, head() + frames.reset(1, frames.INTERNAL_ERROR)),
    "a refusal after the head": (None, head() + frames.reset(1, frames.REFUSED_STREAM)),
    "a credit of nothing on the stream": (None, head() + frames.window_update(1, 0)),
    "a credit too large on the stream": (None, head() + frames.window_update(1, 2**31 - 1)),
    "headers that are too many": (None, head(1, HEAD + LARGE_ENTRY + b"\xbe" * 100)),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_wrong_answer_fails_its_call_and_no_other(name: str) -> None:
    expected, answer = ANSWERS[name]

    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.take_call()
        peer.send(answer)
        assert await peer.take_call() == 3
        peer.send(head(3), data(b"fine", stream=3), trailers(3))

    async with staged(script) as stage:
        with pytest.raises(Upstream) as caught:
            await stage.ask()
        assert getattr(caught.value, "status", None) == expected
        assert caught.value.code == "upstream_error"
        assert await stage.ask() == [b"fine"]
        assert stage.connections == 1


async def test_a_refused_stream_was_not_processed() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.take_call()
        peer.send(frames.reset(1, frames.REFUSED_STREAM))
        await peer.until_closed()

    async with staged(script) as stage:
        with pytest.raises(Unavailable) as caught:
            await stage.ask()
        assert caught.value.code == "replica_unreachable"


async def test_a_reset_after_the_trailers_changes_nothing() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.take_call()
        peer.send(head(), data(b"x"), trailers(), frames.reset(1, frames.NO_ERROR), data(b"late"), trailers())
        await peer.until_closed()

    async with staged(script) as stage:
        assert await stage.ask() == [b"x"]
        assert len(stage.client.connections_to(stage.address)) == 1


async def test_goaway_separates_what_was_begun_from_what_was_not() -> None:
    seconds = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.greet()
        if seconds.is_set():
            assert await peer.take_call() == 1
            peer.send(head(), data(b"new connection"), trailers())
            return
        for stream in (1, 3, 5):
            assert await peer.take_call() == stream
        seconds.set()
        peer.send(frame(frames.GOAWAY, 0, 0, number(3) + number(frames.NO_ERROR) + b"bye"))
        for stream in (1, 3):
            peer.send(head(stream), data(b"begun", stream=stream), trailers(stream))
        await peer.until_closed()

    async with staged(script) as stage:
        streams = [await stage.start() for _ in range(3)]
        for stream in streams[:2]:
            assert await stream.next_messages() == [b"begun"]
            assert await stream.next_messages() == []
        with pytest.raises(Unavailable) as caught:
            await streams[2].next_messages()
        assert caught.value.code == "replica_unreachable"
        assert await stage.ask() == [b"new connection"]
        assert stage.connections == 2


async def test_a_new_connection_is_opened_when_numbers_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "LAST_STREAM", 3)

    async def script(peer: Peer) -> None:
        await peer.greet()
        for _ in range(2):
            stream = await peer.take_call()
            peer.send(head(stream), data(b"x", stream=stream), trailers(stream))
        await peer.until_closed()

    async with staged(script) as stage:
        for _ in range(6):
            assert await stage.ask() == [b"x"]
        assert stage.connections == 3
        assert stage.client.connections_to(stage.address) == []


# Flow control -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1000, 16_000, 40_000])
async def test_more_than_the_window_of_a_stream_ends_the_connection(size: int) -> None:
    """Small messages and frames, one frame per message, and messages of several frames."""
    told = asyncio.get_running_loop().create_future()

    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.take_call()
        whole = framed(bytes(size)) * (WINDOW_BYTES // size + 2)
        step = size + 5 if size < 16_000 else 16_384
        pieces = [frame(frames.DATA, 0, 1, whole[at : at + step]) for at in range(0, len(whole), step)]
        peer.send(head(), *pieces)
        told.set_result(await peer.told_code())

    async with staged(script) as stage:
        stream = await stage.start()
        assert await told == frames.FLOW_CONTROL_ERROR
        assert sum(map(len, stream.messages)) <= WINDOW_BYTES
        with pytest.raises(Upstream):
            await rest_of(stream)


async def test_a_reader_gives_credit_for_what_it_took() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.take_call()
        peer.send(head())
        for _ in range(5):
            peer.send(*[data(bytes(995))] * 200)
            _, _, credit = await peer.next_frame(frames.WINDOW_UPDATE, 1)
            assert int.from_bytes(credit, "big") >= WINDOW_BYTES // 2
        peer.send(trailers())

    async with staged(script) as stage:
        assert await stage.ask() == [bytes(995)] * 1000


@pytest.mark.parametrize("messages", [1, 2])
async def test_the_window_of_the_connection_is_credited_though_nobody_reads(
    messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames of one message and of several are counted in different places."""
    monkeypatch.setattr(http2, "CONNECTION_CREDIT_BYTES", 50_000)

    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.next_frame(frames.WINDOW_UPDATE, 0)
        await peer.take_call()
        peer.send(head(), *[data(*[bytes(995)] * messages)] * 100)
        _, _, credit = await peer.next_frame(frames.WINDOW_UPDATE, 0)
        assert int.from_bytes(credit, "big") >= 50_000
        peer.send(trailers())

    async with staged(script) as stage:
        stream = await stage.start()
        await until(lambda: stream.is_over)
        assert len(await rest_of(stream)) == 100 * messages


@pytest.mark.parametrize("has_reader", [True, False])
async def test_a_message_may_be_larger_than_the_window(has_reader: bool) -> None:
    """Credit is given while the message is incomplete, to a reader that waits already or begins to."""
    is_filled = asyncio.Event()
    whole = framed(bytes(2 * WINDOW_BYTES))

    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.take_call()
        peer.send(head())
        for at in range(0, WINDOW_BYTES, 16_384):
            peer.send(frame(frames.DATA, 0, 1, whole[at : at + 16_384]))
        await is_filled.wait()
        sent, granted = WINDOW_BYTES, WINDOW_BYTES
        while sent < len(whole):
            if granted == sent:
                _, _, credit = await peer.next_frame(frames.WINDOW_UPDATE, 1)
                granted += int.from_bytes(credit, "big")
            size = min(16_384, granted - sent, len(whole) - sent)
            peer.send(frame(frames.DATA, 0, 1, whole[sent : sent + size]))
            sent += size
        peer.send(trailers())

    async with staged(script) as stage:
        stream = await stage.start()
        if has_reader:
            is_filled.set()
        else:
            await until(lambda: stream.window == 0)
            is_filled.set()
        assert await rest_of(stream) == [whole[5:]]


async def test_a_frame_that_looks_like_a_message_may_be_part_of_another() -> None:
    inner = framed(b"inner")

    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.take_call()
        whole = framed(b"ab" + inner)
        peer.send(head(), frame(frames.DATA, 0, 1, whole[: -len(inner)]), frame(frames.DATA, 0, 1, inner), trailers())

    async with staged(script) as stage:
        assert await stage.ask() == [b"ab" + inner]


async def test_nothing_is_sent_beyond_the_window_of_the_connection() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet({frames.INITIAL_WINDOW_SIZE: 2**20})
        received = 0
        while received < frames.DEFAULT_WINDOW_BYTES:
            received += len((await peer.next_frame(frames.DATA))[2])
        assert received == frames.DEFAULT_WINDOW_BYTES
        peer.send(frame(frames.PING, 0, 0, bytes(8)))
        assert (await peer.any_frame())[0] == frames.PING
        peer.send(frames.window_update(0, 2**20))
        while received < 100_005:
            received += len((await peer.next_frame(frames.DATA))[2])
        peer.send(head(), trailers())

    async with staged(script) as stage:
        assert await stage.ask(bytes(100_000)) == []


async def test_an_answer_to_half_a_request_resets_the_stream() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.next_frame(frames.DATA)
        peer.send(head(), trailers())
        assert await peer.next_frame(frames.RST_STREAM) == (0, 1, number(frames.CANCEL))

    async with staged(script) as stage:
        assert await stage.ask(bytes(100_000)) == []


async def test_a_caller_that_leaves_half_a_request_resets_the_stream() -> None:
    is_met = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.next_frame(frames.DATA)
        is_met.set()
        assert await peer.next_frame(frames.RST_STREAM) == (0, 1, number(frames.CANCEL))

    async with staged(script) as stage:
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(stage.ask(bytes(100_000)))
            await is_met.wait()
            asking.cancel()


async def test_nothing_is_sent_beyond_the_windows_of_the_peer() -> None:
    sent: list[int] = []

    async def script(peer: Peer) -> None:
        await peer.greet({frames.INITIAL_WINDOW_SIZE: 10})
        # 25 bytes are to be sent: 20 of the message, 5 before it.
        for answer in (
            frames.settings({frames.INITIAL_WINDOW_SIZE: 5})  # now the window is -5
            + frames.window_update(1, 5)  # 0
            + frames.window_update(1, 2),
            frames.settings({frames.INITIAL_WINDOW_SIZE: 8}),
            frames.window_update(1, 100),
        ):
            _, _, payload = await peer.next_frame(frames.DATA)
            sent.append(len(payload))
            # Whatever is sent too early would be read before the reply to this.
            peer.send(frame(frames.PING, 0, 0, bytes(8)), answer)
            await peer.next_frame(frames.PING)
        flags, _, payload = await peer.next_frame(frames.DATA)
        sent.append(len(payload))
        assert flags & frames.END_STREAM
        peer.send(head(), data(b"x"), trailers())

    async with staged(script) as stage:
        assert await stage.ask(b"m" * 20) == [b"x"]
        assert sent == [10, 2, 3, 10]


async def test_frames_are_as_large_as_the_peer_allows() -> None:
    sizes: list[int] = []

    async def script(peer: Peer) -> None:
        await peer.greet({frames.MAX_FRAME_SIZE: 20_000, frames.INITIAL_WINDOW_SIZE: 2**20})
        flags = 0
        while not flags & frames.END_STREAM:
            flags, _, payload = await peer.next_frame(frames.DATA)
            sizes.append(len(payload))
        peer.send(head(), trailers())

    async with staged(script) as stage:
        assert await stage.ask(bytes(50_000)) == []
        assert sizes == [20_000, 20_000, 10_005]


async def test_the_connection_window_is_shared_by_senders() -> None:
    """Both are larger than the window of the connection, and neither waits for the whole other."""
    order: list[int] = []

    async def script(peer: Peer) -> None:
        await peer.greet({frames.INITIAL_WINDOW_SIZE: 2**20})
        left = {1: 300_005, 3: 300_005}
        while any(left.values()):
            _, stream, payload = await peer.next_frame(frames.DATA)
            left[stream] -= len(payload)
            order.append(stream)
            peer.send(frames.window_update(0, len(payload)))
        peer.send(head(1), trailers(1), head(3), trailers(3))

    async with staged(script) as stage:
        async with asyncio.TaskGroup() as group:
            group.create_task(stage.ask(bytes(300_000)))
            group.create_task(stage.ask(bytes(300_000)))
        assert order.index(3) < len(order) - order[::-1].index(1) - 1


# The connection -----------------------------------------------------------------------------------------------------


async def test_pings_and_settings_are_answered() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        flags, _, _ = await peer.next_frame(frames.SETTINGS)
        assert not flags & frames.ACK
        flags, _, payload = await peer.next_frame(frames.SETTINGS)
        assert (flags, payload) == (frames.ACK, b"")
        await peer.take_call()
        peer.send(frame(frames.PING, 0, 0, b"12345678"), frame(frames.PING, frames.ACK, 0, b"87654321"))
        assert await peer.next_frame(frames.PING) == (frames.ACK, 0, b"12345678")
        peer.send(frame(77, 0, 0, b"unknown"), frame(frames.PRIORITY, 0, 1, bytes(5)))
        peer.send(head(), data(b"x"), trailers())

    async with staged(script) as stage:
        assert await stage.ask() == [b"x"]


async def test_early_hints_padding_and_priorities_are_skipped() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.take_call()
        peer.send(head(1, hpack.encode([(b":status", b"103")])))
        block = b"\x03" + bytes(5) + HEAD + bytes(3)
        peer.send(frame(frames.HEADERS, WHOLE | PADDED | frames.WITH_PRIORITY, 1, block))
        peer.send(frame(frames.DATA, PADDED, 1, b"\x04" + framed(b"padded") + bytes(4)))
        peer.send(frame(frames.HEADERS, frames.END_STREAM, 1, END[:4]))
        peer.send(frame(frames.CONTINUATION, 0, 1), frame(frames.CONTINUATION, WHOLE, 1, END[4:]))

    async with staged(script) as stage:
        assert await stage.ask() == [b"padded"]


async def test_a_cancelled_call_is_reset_and_its_late_frames_do_no_harm() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.take_call()
        peer.send(head(), data(b"x"))
        assert await peer.next_frame(frames.RST_STREAM) == (0, 1, number(frames.CANCEL))
        peer.send(data(b"late"), frame(frames.DATA, 0, 1, b"\0\0"), frames.window_update(1, 5))
        # The trailers change the table of header compression, which the next answer uses.
        peer.send(trailers(1, b"\x40\x0bgrpc-status\x010"))
        assert await peer.take_call() == 3
        peer.send(head(3), data(b"y", stream=3), trailers(3, b"\xbe"))

    async with staged(script) as stage:
        stream = await stage.start()
        assert await stream.next_messages() == [b"x"]
        stream.cancel()
        assert await stage.ask() == [b"y"]
        assert stage.connections == 1


async def test_the_deadline_ends_a_silent_call_and_resets_it() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.take_call()
        assert await peer.next_frame(frames.RST_STREAM) == (0, 1, number(frames.CANCEL))

    async with staged(script) as stage:
        with pytest.raises(Upstream) as caught:
            await stage.ask(deadline_seconds=0.05)
        assert caught.value.code == "upstream_timeout"


async def test_the_deadline_ends_a_request_that_cannot_be_sent() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet({frames.INITIAL_WINDOW_SIZE: 0})
        assert await peer.next_frame(frames.RST_STREAM) == (0, 1, number(frames.CANCEL))

    async with staged(script) as stage:
        with pytest.raises(Upstream) as caught:
            await stage.ask(deadline_seconds=0.05)
        assert caught.value.code == "upstream_timeout"


class Recorder(asyncio.Transport):
    """Takes what a connection writes, for tests that decide what each socket read contains."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None: ...
    def abort(self) -> None: ...


async def opened(streams: int) -> tuple[Http2Connection, Recorder, list[GrpcStream]]:
    connection = Http2Connection("127.0.0.1:1", lambda _: None)
    recorder = Recorder()
    connection.connection_made(recorder)
    connection.data_received(frames.settings({}))
    started = [await connection.start(b"", b"12345", deadline_seconds=60, ends=True) for _ in range(streams)]
    return connection, recorder, started


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_messages_are_the_same_however_frames_and_reads_are_cut(drawn: st.DataObject) -> None:
    messages = drawn.draw(st.lists(st.binary(max_size=60), max_size=12))
    body = b"".join(map(framed, messages))
    cuts = drawn.draw(st.lists(st.integers(0, len(body)), max_size=8).map(sorted))
    sent = head() + head(3)
    for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        padding = drawn.draw(st.sampled_from([None, 0, 3]))
        if padding is None:
            sent += frame(frames.DATA, 0, 1, body[start:end])
        else:
            sent += frame(frames.DATA, PADDED, 1, bytes([padding]) + body[start:end] + bytes(padding))
        sent += data(b"other", stream=3)
    sent += trailers(1) + trailers(3)
    reads = drawn.draw(st.lists(st.integers(0, len(sent)), max_size=30).map(sorted))

    async def run() -> None:
        connection, _, (first, second) = await opened(2)
        for start, end in zip([0, *reads], [*reads, len(sent)], strict=True):
            connection.data_received(sent[start:end])
        assert first.messages == messages
        assert second.messages == [b"other"] * (len(cuts) + 1)
        for stream in (first, second):
            stream.messages = []
            assert await stream.next_messages() == []
        connection.close()

    asyncio.run(run())


async def test_only_the_first_call_says_that_there_is_no_table() -> None:
    """Else a peer that reduces the table would wait for this in the next block (RFC 7541, 4.2)."""

    async def script(peer: Peer) -> None:
        await peer.greet()
        blocks = [(await peer.next_frame(frames.HEADERS))[2] for _ in range(2)]
        assert blocks[0] == hpack.NO_TABLE + blocks[1]
        peer.send(head(1), trailers(1), head(3), trailers(3))

    async with staged(script) as stage:
        first, second = await stage.start(), await stage.start()
        assert [await first.next_messages(), await second.next_messages()] == [[], []]


async def test_a_connection_without_numbers_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "LAST_STREAM", 3)
    assert (await opened(1))[0].has_room
    assert not (await opened(2))[0].has_room


async def test_a_connection_that_is_going_away_has_no_room() -> None:
    connection, _, (stream,) = await opened(1)
    connection.data_received(frame(frames.GOAWAY, 0, 0, number(1) + number(0)))
    assert not connection.has_room
    connection.data_received(head() + data(b"x") + trailers())
    assert await stream.next_messages() == [b"x"]
    assert connection.is_lost


async def test_a_peer_that_asks_and_does_not_read_is_left() -> None:
    connection, recorder, (stream,) = await opened(1)
    connection.pause_writing()
    ping = frame(frames.PING, 0, 0, bytes(8))
    for _ in range(10):
        connection.data_received(ping * 1000)
    assert connection.is_lost
    assert len(recorder.written) < 200_000
    with pytest.raises(Upstream):
        await stream.next_messages()


async def test_a_peer_that_asks_much_and_reads_is_served() -> None:
    connection, recorder, _ = await opened(1)
    for _ in range(50):
        connection.pause_writing()
        connection.data_received(frame(frames.PING, 0, 0, bytes(8)) * 1000)
        connection.resume_writing()
    await asyncio.sleep(0)  # a turn of the loop, with which replies go out
    assert not connection.is_lost
    assert recorder.written.count(frames.ping_ack(bytes(8))) == 50_000
    connection.close()


async def test_one_read_wakes_a_reader_once() -> None:
    connection, _, (stream,) = await opened(1)
    connection.data_received(head())
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(stream.next_messages())
        await asyncio.sleep(0)
        connection.data_received(data(b"t") * 500)
    assert reading.result() == [b"t"] * 500
    connection.close()
