"""The gRPC client against real servers of three makers: every test runs against each, on the loop of the product."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from tests.engine.localai.real_servers import MAKERS, RealServer, order, running_server

from enginehouse.core.errors import EnginehouseError, TooLarge, Unavailable, Upstream
from enginehouse.engine.localai import status
from enginehouse.engine.localai.channel import GrpcCall, GrpcClient
from enginehouse.engine.localai.status import GrpcError
from enginehouse.engine.localai.stream import MAX_MESSAGE_BYTES, WINDOW_BYTES, GrpcStream

LIMIT_SECONDS = 30.0


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module", params=MAKERS)
async def server(request: pytest.FixtureRequest) -> AsyncIterator[RealServer]:
    async with running_server(request.param) as running:
        yield running


@pytest.fixture
async def client() -> AsyncIterator[GrpcClient]:
    made = GrpcClient()
    yield made
    await made.close()


def call(server: RealServer, message: bytes, **more: object) -> GrpcCall:
    values: dict[str, object] = {"method": "PredictStream", "connect_seconds": 10.0, "deadline_seconds": LIMIT_SECONDS}
    return GrpcCall(address=server.address, message=message, **(values | more))  # type: ignore[arg-type]


async def everything(stream: GrpcStream, messages: list[bytes] | None = None) -> list[bytes]:
    messages = [] if messages is None else messages
    while batch := await stream.next_messages():
        messages += batch
    return messages


async def send_many(stream: GrpcStream, count: int, size: int) -> None:
    for _ in range(count):
        await stream.send(bytes(size))


async def told(client: GrpcClient, server: RealServer, **values: object) -> bytes:
    return await client.unary(call(server, order(**values)))


@pytest.mark.parametrize("size", [0, 1, 1000, 16_379, 16_380, 65_535, 1_000_000])
async def test_a_message_of_any_size_comes_back_unchanged(server: RealServer, client: GrpcClient, size: int) -> None:
    message = bytes(number * 7 % 251 for number in range(size))
    assert await client.unary(call(server, message, method="Predict")) == message


async def test_a_message_of_50_mib_passes_both_ways(server: RealServer, client: GrpcClient) -> None:
    message = b"0123456789abcdef" * (MAX_MESSAGE_BYTES // 16)
    assert len(message) == MAX_MESSAGE_BYTES
    assert await client.unary(call(server, message, method="Predict")) == message


async def test_a_larger_message_is_refused_and_the_connection_goes_on(server: RealServer, client: GrpcClient) -> None:
    with pytest.raises(TooLarge):
        await client.unary(call(server, bytes(MAX_MESSAGE_BYTES + 1), method="Predict"))
    stream = await client.start(call(server, order(do="stream", count=1, size=MAX_MESSAGE_BYTES + 1)))
    with pytest.raises(GrpcError) as caught:
        await everything(stream)
    assert caught.value.status == status.RESOURCE_EXHAUSTED
    assert await client.unary(call(server, b"still", method="Predict")) == b"still"


@pytest.mark.parametrize(("count", "size"), [(0, 0), (1, 0), (5000, 0), (20_000, 12), (300, 20_000), (20, 500_000)])
async def test_a_stream_delivers_all_messages(server: RealServer, client: GrpcClient, count: int, size: int) -> None:
    messages = await everything(await client.start(call(server, order(do="stream", count=count, size=size))))
    assert len(messages) == count
    assert {len(message) for message in messages} <= {size}


async def test_a_thousand_streams_share_one_connection(server: RealServer, client: GrpcClient) -> None:
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(client.start(call(server, order(do="wait")))) for _ in range(1000)]
    streams = [task.result() for task in asked]
    for stream in streams:
        assert await stream.next_messages() == [b"begun"]
    assert len(client.connections_to(server.address)) == 1
    assert await client.unary(call(server, b"between", method="Predict")) == b"between"
    for stream in streams:
        stream.cancel()


@pytest.mark.parametrize("text", ["", "plain", "a model of 5 % was not found: ä € 🚂\nsecond line", "x" * 5000])
async def test_an_error_at_once_has_its_status_and_its_text(server: RealServer, client: GrpcClient, text: str) -> None:
    stream = await client.start(call(server, order(do="fail", status=5, text=text)))
    with pytest.raises(GrpcError) as caught:
        await stream.next_messages()
    assert (caught.value.status, caught.value.detail) == (status.NOT_FOUND, text)
    assert caught.value.code == "upstream_error"


async def test_an_error_after_messages_comes_after_them(server: RealServer, client: GrpcClient) -> None:
    stream = await client.start(call(server, order(do="fail", count=7, size=100, status=13, text="it broke")))
    messages: list[bytes] = []
    with pytest.raises(GrpcError) as caught:
        await everything(stream, messages)
    assert (len(messages), caught.value.status, caught.value.detail) == (7, status.INTERNAL, "it broke")


async def test_a_method_that_is_missing_is_unimplemented(server: RealServer, client: GrpcClient) -> None:
    with pytest.raises(GrpcError) as caught:
        await client.unary(call(server, b"", method="Rerank"))
    assert caught.value.status == status.UNIMPLEMENTED


async def test_several_answers_are_not_one(server: RealServer, client: GrpcClient) -> None:
    for count in (0, 2):
        with pytest.raises(Upstream) as caught:
            await client.unary(call(server, order(do="stream", count=count, size=3)))
        assert not isinstance(caught.value, GrpcError)


async def test_an_engine_stops_when_its_call_is_cancelled(server: RealServer, client: GrpcClient) -> None:
    before = int(await told(client, server, do="cancelled"))
    stream = await client.start(call(server, order(do="wait")))
    assert await stream.next_messages() == [b"begun"]
    stream.cancel()
    stream.cancel()
    with pytest.raises(Upstream):
        await stream.next_messages()
    await until_cancelled(client, server, before + 1)


async def test_an_engine_stops_at_the_deadline(server: RealServer, client: GrpcClient) -> None:
    before = int(await told(client, server, do="cancelled"))
    began = time.monotonic()
    stream = await client.start(call(server, order(do="wait"), deadline_seconds=0.4))
    assert await stream.next_messages() == [b"begun"]
    with pytest.raises(Upstream) as caught:
        await stream.next_messages()
    assert caught.value.code == "upstream_timeout"
    assert 0.3 < time.monotonic() - began < 5
    await until_cancelled(client, server, before + 1)


async def until_cancelled(client: GrpcClient, server: RealServer, count: int) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while int(await told(client, server, do="cancelled")) < count:
            pass


@pytest.mark.parametrize("seconds", [2.0, 200.0, 200_000.0])
async def test_an_engine_is_told_the_deadline(server: RealServer, client: GrpcClient, seconds: float) -> None:
    left = int(await client.unary(call(server, order(do="deadline"), deadline_seconds=seconds)))
    assert seconds * 1000 - 1900 <= left <= seconds * 1000 + 1000


async def test_an_engine_gets_the_key(server: RealServer, client: GrpcClient) -> None:
    message = order(do="metadata", name="authorization")
    assert await client.unary(call(server, message, key="s3cret")) == b"Bearer s3cret"
    assert await client.unary(call(server, message)) == b""


async def test_a_key_larger_than_a_frame_arrives(server: RealServer, client: GrpcClient) -> None:
    """Headers that need CONTINUATION. grpcio reads them and then refuses more than 16 KiB, by a status."""
    large = call(server, order(do="metadata", name="authorization"), key="k" * 40_000)
    if server.maker == "grpcio":
        with pytest.raises(GrpcError) as caught:
            await client.unary(large)
        assert caught.value.status == status.RESOURCE_EXHAUSTED
    else:
        assert await client.unary(large) == b"Bearer " + b"k" * 40_000
    assert await client.unary(call(server, b"still", method="Predict")) == b"still"


async def test_large_headers_and_trailers_are_read(server: RealServer, client: GrpcClient) -> None:
    for size in (1, 5000, 20_000, 50_000):
        assert await told(client, server, do="headers", size=size) == b"filled"


async def test_an_engine_that_reads_slowly_gets_everything(server: RealServer, client: GrpcClient) -> None:
    stream = await client.start(call(server, order(do="collect", pause_ms=2), ends=False))
    await send_many(stream, 60, 100_000)
    await stream.end()
    assert await everything(stream) == [b"60 messages of 6000000 bytes"]


async def test_both_sides_speak_in_turn(server: RealServer, client: GrpcClient) -> None:
    stream = await client.start(call(server, order(do="echo"), ends=False))
    for number in range(50):
        await stream.send(b"%d" % number)
        assert await stream.next_messages() == [b"%d" % number]
    await stream.end()
    assert await stream.next_messages() == []


async def test_a_caller_that_does_not_read_stops_only_its_own_stream(server: RealServer, client: GrpcClient) -> None:
    stalled = [await client.start(call(server, order(do="stream", count=400, size=50_000))) for _ in range(5)]
    for number in range(100):
        assert await client.unary(call(server, b"%d" % number, method="Predict")) == b"%d" % number
    async with asyncio.timeout(LIMIT_SECONDS):
        while any(stream.window > 50_000 for stream in stalled):
            assert await client.unary(call(server, b"more", method="Predict")) == b"more"
    for stream in stalled:
        assert sum(map(len, stream.messages)) <= WINDOW_BYTES
    for stream in stalled:
        assert len(await everything(stream)) == 400


async def test_sending_is_cancelled_with_its_caller(server: RealServer, client: GrpcClient) -> None:
    stream = await client.start(call(server, order(do="collect", pause_ms=1000), ends=False))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(send_many(stream, 1000, 1_000_000), 0.3)
    with pytest.raises(Upstream):
        await stream.next_messages()
    assert await client.unary(call(server, b"still", method="Predict")) == b"still"


async def test_an_answer_ends_a_request_that_is_still_being_sent(server: RealServer, client: GrpcClient) -> None:
    stream = await client.start(call(server, order(do="fail", status=9, text="not loaded"), ends=False))
    with pytest.raises(EnginehouseError):
        await send_many(stream, 1000, 100_000)
    with pytest.raises(GrpcError) as caught:
        await stream.next_messages()
    assert caught.value.status == status.FAILED_PRECONDITION
    assert await client.unary(call(server, b"still", method="Predict")) == b"still"


@pytest.mark.parametrize("maker", MAKERS)
async def test_calls_continue_over_connections_that_go_away(maker: str, client: GrpcClient) -> None:
    async with running_server(maker, max_age_ms=200) as server:
        lasting = await client.start(call(server, order(do="echo"), ends=False))
        seen: set[int] = set()
        async with asyncio.timeout(LIMIT_SECONDS):
            while len(seen) < 4:
                try:
                    assert await client.unary(call(server, b"again", method="Predict")) == b"again"
                except Unavailable as error:
                    # It crossed the GOAWAY on its way, and was not begun: whoever asked may ask again.
                    assert error.code == "replica_unreachable"  # noqa: PT017
                seen |= set(map(id, client.connections_to(server.address)))
        await lasting.send(b"old but well")
        assert await lasting.next_messages() == [b"old but well"]
        await lasting.end()
        assert await lasting.next_messages() == []


@pytest.mark.parametrize("maker", MAKERS)
async def test_another_connection_is_opened_when_one_is_full(maker: str, client: GrpcClient) -> None:
    async with running_server(maker, max_streams=4) as server:
        streams = [await client.start(call(server, order(do="wait"))) for _ in range(10)]
        for stream in streams:
            assert await stream.next_messages() == [b"begun"]
        assert len(client.connections_to(server.address)) == 3
        for stream in streams:
            stream.cancel()
        assert await client.unary(call(server, b"room", method="Predict")) == b"room"


@pytest.mark.parametrize("maker", MAKERS)
async def test_an_orderly_end_completes_what_was_begun(maker: str, client: GrpcClient) -> None:
    async with running_server(maker) as server:
        stream = await client.start(call(server, order(do="echo"), ends=False))
        await stream.send(b"before")
        assert await stream.next_messages() == [b"before"]
        server.leave()
        async with asyncio.timeout(LIMIT_SECONDS):
            while client.connections_to(server.address):
                await stream.send(b"during")
                assert await stream.next_messages() == [b"during"]
        await stream.end()
        assert await stream.next_messages() == []
        with pytest.raises(Unavailable) as caught:
            await client.unary(call(server, b"after", method="Predict"))
        assert caught.value.code == "replica_unreachable"


@pytest.mark.parametrize("maker", MAKERS)
async def test_a_killed_engine_fails_its_calls_and_then_is_unreachable(maker: str, client: GrpcClient) -> None:
    async with running_server(maker) as server:
        stream = await client.start(call(server, order(do="wait")))
        assert await stream.next_messages() == [b"begun"]
        server.kill()
        with pytest.raises(Upstream) as caught:
            await stream.next_messages()
        assert caught.value.code == "upstream_error"
        with pytest.raises(Unavailable) as refused:
            await client.start(call(server, b""))
        assert refused.value.code == "replica_unreachable"
