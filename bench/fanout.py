"""One install to 1, 10 and 50 nodes that each take one second: wall time over that of a single node.

Real NATS, a real frontend with SQLite, and stub workers that register, listen and answer like real ones but only wait.
The bar is 1.5: sending to all nodes at once costs next to nothing, sending one after the other would cost 50.

    .venv/bin/python bench/fanout.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

from nacl.signing import SigningKey

from enginehouse.bus import credentials, embedded
from enginehouse.bus.nats import BusOptions, NatsBus
from enginehouse.core import wire
from enginehouse.core.errors import EnginehouseError
from enginehouse.core.node import registration_message
from enginehouse.core.report import Report
from enginehouse.host import processes
from enginehouse.link.client import FrontendClient
from enginehouse.link.worker import WorkerLink
from enginehouse.ports import Message

BAR = 1.5
WORK_SECONDS = 1.0
TOKEN = "eh-bench-" + "0" * 40


class StubWorker:
    """A worker whose installs take one second and do nothing."""

    def __init__(self, name: str, link: WorkerLink, group: asyncio.TaskGroup) -> None:
        self._name = name
        self._link = link
        self._group = group
        self._key = SigningKey.generate()

    @property
    def public_key(self) -> str:
        return self._key.verify_key.encode().hex()

    async def join(self) -> None:
        signature = self._key.sign(registration_message(self._name, self.public_key)).signature.hex()
        request = wire.RegisterRequest(
            name=self._name,
            address="127.0.0.1:50051",
            token=TOKEN,
            public_key=self.public_key,
            signature=signature,
            platform="linux/amd64",
            capability="default",
        )
        reply = await self._link.register(request)
        options = BusOptions(url=reply.nats_url, name=self._name, jwt=reply.nats_jwt, seed=reply.nats_user_seed)
        self._bus = await NatsBus.connect(options, limit_seconds=10)
        await self._bus.subscribe(wire.node_subject(reply.id, wire.INSTALL), self._take)
        heartbeat = wire.HeartbeatRequest(report=Report(boot_id=self._name, sequence=1, mark=reply.mark))
        await self._link.heartbeat(reply.id, reply.node_token, heartbeat)

    def _take(self, message: Message) -> None:
        self._group.create_task(self._install(message))

    async def _install(self, message: Message) -> None:
        request = wire.decode(message.payload, wire.BackendInstallRequest, "an install")
        assert request.resolved is not None
        await asyncio.sleep(WORK_SECONDS)
        await self._bus.publish(message.reply, wire.encode(wire.BackendInstallReply(success=True)))

    async def leave(self) -> None:
        await self._bus.close()


async def measure(count: int, rounds: int) -> float:
    """The median wall time of one install to `count` nodes, from the request to the last outcome."""
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch)
        for role in ("admin", "join"):
            (data / f"{role}.token").write_text(TOKEN + role)
        server = embedded.prepare(
            data / "bus",
            credentials.load_or_create(data / "bus"),
            host="127.0.0.1",
            port=None,
            log_path=data / "nats.log",
        )
        nats = await processes.spawn(server.argv, directory=data, environment=os.environ, log=data / "nats.log")
        frontend = None
        try:
            async with asyncio.TaskGroup() as group:
                port = _free_port()
                url = f"http://127.0.0.1:{port}"
                client = FrontendClient(url, TOKEN + "admin", user_agent="bench")
                join = [WorkerLink(FrontendClient(url, TOKEN + "join", user_agent="bench")) for _ in range(count)]
                workers = [StubWorker(f"stub-{number}", link, group) for number, link in enumerate(join)]
                argv = [sys.executable, "-m", "enginehouse", "frontend", "--data", str(data), "--port", str(port)]
                argv += ["--nats-url", server.url, "--stale", "600s"]
                argv += ["--approve-keys", ",".join(worker.public_key for worker in workers)]
                frontend = await processes.spawn(
                    argv, directory=data, environment=os.environ, log=data / "frontend.log"
                )
                await _until_ready(client)
                for worker in workers:
                    await worker.join()
                times = [await _one_round(client) for _ in range(rounds)]
                for worker in workers:
                    await worker.leave()
            return statistics.median(times)
        finally:
            if frontend is not None:
                await processes.stop_group(frontend, 10)
            await processes.stop_group(nats, 5)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _until_ready(client: FrontendClient) -> None:
    for _ in range(600):
        try:
            await asyncio.to_thread(client.request_bytes, "GET", "/readyz")
            return
        except EnginehouseError as error:
            last = error
            await asyncio.sleep(0.05)
    raise SystemExit(f"the frontend did not become ready: {last}")


async def _one_round(client: FrontendClient) -> float:
    def follow() -> float:
        began = time.perf_counter()
        body = {"kind": "install", "name": "llama-cpp", "force": True}
        operation = client.request("POST", "/api/operations", body, dict[str, object])
        with client.stream_events(f"/api/events?operation={operation['jobID']}") as events:
            for event in events:
                if b'"status":"succeeded"' in event.data and b'"isParked":false' in event.data:
                    import msgspec

                    if msgspec.json.decode(event.data)["status"] == "succeeded":
                        return time.perf_counter() - began
        raise SystemExit("the operation did not succeed")

    return await asyncio.to_thread(follow)


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under 50 s")
    quick = parser.parse_args().quick
    rounds = 3 if quick else 9
    times = {count: await measure(count, rounds) for count in (1, 10, 50)}
    for count, seconds in times.items():
        print(f"{count:3d} nodes: {seconds:.3f} s ({seconds / times[1]:.2f} x one node)")
    ratio = max(times[10], times[50]) / times[1]
    print(f"fanout: {ratio:.2f} (bar 1.5: wall time of 50 nodes over that of one)")
    return 0 if ratio <= BAR else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
