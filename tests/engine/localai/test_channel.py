"""The pool of connections: shared, replaced, and never a reason to send a call twice."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from tests.engine.localai.scripted import Peer, data, head, staged, trailers, until

from enginehouse.core.errors import Invalid, TooLarge, Unavailable, Upstream, exit_code, http_status
from enginehouse.engine.localai import channel, frames
from enginehouse.engine.localai.channel import GrpcCall, GrpcClient
from enginehouse.engine.localai.status import GrpcError, timeout_value
from enginehouse.engine.localai.stream import MAX_MESSAGE_BYTES


async def answering(peer: Peer) -> None:
    await peer.greet()
    with contextlib.suppress(asyncio.IncompleteReadError):  # the client has left
        while True:
            stream = await peer.take_call()
            peer.send(head(stream), data(b"x", stream=stream), trailers(stream))


async def holding(peer: Peer) -> None:
    """Allows two streams and answers none."""
    await peer.greet({frames.MAX_CONCURRENT_STREAMS: 2})
    await peer.until_closed()


async def test_callers_at_once_open_one_connection() -> None:
    async with staged(answering) as stage:
        async with asyncio.TaskGroup() as group:
            for _ in range(50):
                group.create_task(stage.ask())
        assert stage.connections == 1


async def test_a_caller_that_leaves_while_connecting_takes_nobody_along() -> None:
    is_let, is_met = asyncio.Event(), asyncio.Event()

    async def script(peer: Peer) -> None:
        is_met.set()
        await is_let.wait()
        with contextlib.suppress(asyncio.IncompleteReadError):
            await answering(peer)

    async with staged(script) as stage:
        first, second = asyncio.ensure_future(stage.ask()), asyncio.ensure_future(stage.ask())  # noqa: TID251
        await is_met.wait()
        first.cancel()
        await asyncio.wait([first])
        is_let.set()
        assert await second == [b"x"]
        assert first.cancelled()


async def test_connections_are_added_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_CONNECTIONS", 3)
    async with staged(holding) as stage:
        streams = [await stage.start() for _ in range(6)]
        assert stage.connections == 3
        with pytest.raises(Unavailable) as caught:
            await stage.start()
        assert caught.value.code == "resource_exhausted"
        streams[0].cancel()
        await stage.start()
        assert stage.connections == 3


async def test_a_peer_that_allows_no_stream_is_unreachable() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet({frames.MAX_CONCURRENT_STREAMS: 0})
        await peer.until_closed()

    async with staged(script) as stage:
        with pytest.raises(Unavailable) as caught:
            await stage.start()
        assert caught.value.code == "replica_unreachable"
        assert stage.client.connections_to(stage.address) == []


async def test_a_lost_connection_is_replaced_for_the_next_call() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        stream = await peer.take_call()
        peer.send(head(stream), data(b"x", stream=stream), trailers(stream))

    async with staged(script) as stage:
        for number in range(1, 4):
            assert await stage.ask() == [b"x"]
            await until(lambda: not stage.client.connections_to(stage.address))
            assert stage.connections == number


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:0", "127.0.0.1:99999", ":80", "no.such.host.invalid:80"])
async def test_a_wrong_address_is_unreachable(address: str) -> None:
    client = GrpcClient()
    with pytest.raises(Unavailable) as caught:
        await client.start(GrpcCall(address=address, method="Health", connect_seconds=5, deadline_seconds=5))
    assert caught.value.code == "replica_unreachable"
    assert client.connections_to(address) == []
    await client.close()


async def test_a_refused_connection_is_unreachable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        client = GrpcClient()
        with pytest.raises(Unavailable) as caught:
            await client.start(GrpcCall(address=address, method="Health", connect_seconds=5, deadline_seconds=5))
        assert caught.value.code == "replica_unreachable"
        assert not isinstance(caught.value, Upstream)
        await client.close()


@pytest.mark.parametrize("wrong", [{"key": "a\nb"}, {"key": "ä"}, {"method": "Pre\r\ndict"}])
async def test_a_head_that_cannot_be_sent_is_refused(wrong: dict[str, str]) -> None:
    async with staged(answering) as stage:
        with pytest.raises(Invalid):
            await stage.start(b"", **wrong)
        assert stage.connections == 0


async def test_a_message_that_is_too_large_is_not_sent() -> None:
    async with staged(answering) as stage:
        with pytest.raises(TooLarge):
            await stage.start(bytes(MAX_MESSAGE_BYTES + 1))
        assert stage.connections == 0


async def test_a_later_message_that_is_too_large_is_not_sent() -> None:
    async with staged(holding) as stage:
        stream = await stage.start(ends=False)
        with pytest.raises(TooLarge):
            await stream.send(bytes(MAX_MESSAGE_BYTES + 1))


async def test_closing_ends_calls_and_refuses_new_ones() -> None:
    async with staged(holding) as stage:
        stream = await stage.start()
        await stage.client.close()
        with pytest.raises(Upstream):
            await stream.next_messages()
        with pytest.raises(Unavailable):
            await stage.start()


async def test_nothing_is_sent_after_the_end() -> None:
    async with staged(holding) as stage:
        stream = await stage.start()
        with pytest.raises(Upstream):
            await stream.send(b"more")
        await stream.end()


@pytest.mark.parametrize(
    ("seconds", "value"), [(0, b"1m"), (0.0001, b"1m"), (1.5, b"1500m"), (99_999, b"99999000m"), (1e5, b"100000S")]
)
def test_a_deadline_has_at_most_eight_digits(seconds: float, value: bytes) -> None:
    assert timeout_value(seconds) == value


def test_a_status_is_an_error_of_the_other_side() -> None:
    error = GrpcError("here:1", 5, "no such model")
    assert (http_status(error), exit_code(error), error.code) == (502, 4, "upstream_error")
    assert GrpcError("here:1", 4, "").code == "upstream_timeout"
    assert "NOT_FOUND: no such model" in error.message
