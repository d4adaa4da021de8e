"""Tokens per second that a frontend reads from an engine over gRPC: our client over grpc.aio.

Both read 32 streams of 512 messages at once from the same server (grpc-go, in a process of its own) on one long-lived
connection, parse each message and take its text, as the product does. They take turns in one process; grpc.aio runs on
the event loop on which it is faster here. Needs go, to build the server.

    .venv/bin/python bench/grpc_client.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

import grpc
import grpc.aio
from tests.engine.localai.real_servers import go_server, order

from enginehouse.engine.localai.backend_pb2 import Reply
from enginehouse.engine.localai.channel import GrpcCall, GrpcClient

BAR = 5.0
STREAMS, MESSAGES = 32, 512
LIMIT_SECONDS = 60.0
TOKEN = Reply(message=b" token", tokens=1)
REQUEST = order(do="stream", count=MESSAGES, text=TOKEN.SerializeToString().decode())
METHOD = "PredictStream"
Read = Callable[[], Coroutine[None, None, int]]  # one stream to its end: how many bytes of text


@contextlib.contextmanager
def running_server() -> Iterator[str]:
    with subprocess.Popen([go_server()], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield f"127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


@contextlib.asynccontextmanager
async def ours(address: str) -> AsyncIterator[Read]:
    client = GrpcClient()
    call = GrpcCall(address=address, method=METHOD, message=REQUEST, connect_seconds=5, deadline_seconds=LIMIT_SECONDS)

    async def read() -> int:
        size, parse = 0, Reply.FromString
        stream = await client.start(call)
        while messages := await stream.next_messages():
            for message in messages:
                size += len(parse(message).message)
        return size

    yield read
    await client.close()


@contextlib.asynccontextmanager
async def theirs(address: str) -> AsyncIterator[Read]:
    async with grpc.aio.insecure_channel(address) as channel:
        method = channel.unary_stream(f"/backend.Backend/{METHOD}", response_deserializer=Reply.FromString)

        async def read() -> int:
            size = 0
            async for reply in method(REQUEST, timeout=LIMIT_SECONDS):
                size += len(reply.message)
            return size

        yield read


async def measure(
    open_client: Callable[[str], contextlib.AbstractAsyncContextManager[Read]],
    address: str,
    seconds: float,
) -> list[float]:
    """Tokens per second of each round; the first warms up and is not counted."""
    rates: list[float] = []
    async with open_client(address) as read:
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(rates) < 3:
            began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(read()) for _ in range(STREAMS)]
            rates.append(STREAMS * MESSAGES / (time.perf_counter() - began))
            if any(task.result() != MESSAGES * len(TOKEN.message) for task in tasks):
                raise SystemExit("a stream was not read to its end")
    return rates[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description="Tokens per second over gRPC: ours over grpc.aio.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under 50 s")
    turns, seconds = (4, 1.5) if parser.parse_args().quick else (10, 4.0)
    ways = {
        "enginehouse": (ours, uvloop.new_event_loop),
        "grpc.aio": (theirs, asyncio.new_event_loop),
        "grpc.aio on uvloop": (theirs, uvloop.new_event_loop),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with running_server() as address:
        for _ in range(turns):
            for name, (open_client, new_loop) in ways.items():
                with asyncio.Runner(loop_factory=new_loop) as runner:
                    rates[name] += runner.run(measure(open_client, address, seconds))
    medians = {name: statistics.median(each) for name, each in rates.items()}
    for name, each in rates.items():
        print(f"{name:>18}: {medians[name]:9,.0f} tokens/s ({len(each)} rounds, {min(each):,.0f} to {max(each):,.0f})")
    ratio = medians.pop("enginehouse") / max(medians.values())
    print(f"grpc_client: {ratio:.2f} (bar {BAR:g}: tokens per second over those of grpc.aio)")
    return 0 if ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
