"""grpcio with the behaviours that the tests of the gRPC client ask for; see real_servers.py."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

CODES = {code.value[0]: code for code in grpc.StatusCode}


class Counters:
    cancelled = 0


async def answer(request: bytes, context: Any) -> bytes:
    return request


async def behave(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    order = json.loads(await anext(requests))
    match order["do"]:
        case "stream" | "fail":
            message = (
                order["text"].encode() if "text" in order and order["do"] == "stream" else bytes(order.get("size", 0))
            )
            for _ in range(order.get("count", 0)):
                yield message
            if order["do"] == "fail":
                await context.abort(CODES[order["status"]], order["text"])
        case "wait":
            try:
                # A call may be cancelled before this is resumed: the client has the message by then.
                yield b"begun"
                await asyncio.Event().wait()
            finally:
                Counters.cancelled += 1
        case "cancelled":
            yield str(Counters.cancelled).encode()
        case "deadline":
            left = context.time_remaining()
            yield b"none" if left is None else str(round(left * 1000)).encode()
        case "metadata":
            yield ",".join(value for name, value in context.invocation_metadata() if name == order["name"]).encode()
        case "headers":
            filling = (("x-filling", "f" * order["size"]),)
            context.set_trailing_metadata(filling)
            await context.send_initial_metadata(filling)
            yield b"filled"
        case "echo":
            async for message in requests:
                yield message
        case "collect":
            count = size = 0
            async for message in requests:
                count, size = count + 1, size + len(message)
                await asyncio.sleep(order.get("pause_ms", 0) / 1000)
            yield f"{count} messages of {size} bytes".encode()
        case _:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "unknown order")


async def serve(max_age_ms: int, max_streams: int) -> None:
    options: list[tuple[str, int]] = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    if max_age_ms:
        options += [("grpc.max_connection_age_ms", max_age_ms), ("grpc.max_connection_age_grace_ms", 30_000)]
    if max_streams:
        options.append(("grpc.max_concurrent_streams", max_streams))
    server = grpc.aio.server(options=options)
    calls = {
        "Predict": grpc.unary_unary_rpc_method_handler(answer),
        "PredictStream": grpc.stream_stream_rpc_method_handler(behave),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("backend.Backend", calls),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    # Whoever started it is gone, or asks for an orderly end.
    is_asked = bool(await asyncio.to_thread(sys.stdin.buffer.read, 1))
    await server.stop(30 if is_asked else None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-age-ms", type=int, default=0)
    parser.add_argument("--max-streams", type=int, default=0)
    asyncio.run(serve(**vars(parser.parse_args())))
