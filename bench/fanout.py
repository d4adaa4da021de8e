"""One install to 1, 10, 50 and 100 nodes that each take one second: wall time over that of a single node.

Real NATS, a real frontend with SQLite, and stub workers that register, listen and answer like real ones but only wait.
The bar is 1.3: sending to all nodes at once costs next to nothing. Beside it the same install one node after the other,
as LocalAI does it, for a few nodes; the whole picture would take minutes. `--plot FILE` draws both as SVG.

Without `--quick` the two that belong to it are run as well: a long backlog (`backlog.py`) and many watchers
(`watchers.py`), and this one holds where all three do.

    .venv/bin/python bench/fanout.py [--quick] [--plot FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from nacl.signing import SigningKey

from enginehouse.bus import credentials, embedded
from enginehouse.bus.nats import BusOptions, NatsBus
from enginehouse.core import node_api, subjects, wire
from enginehouse.core.errors import EnginehouseError
from enginehouse.core.report import Report
from enginehouse.host import processes
from enginehouse.link.client import FrontendClient
from enginehouse.link.worker import WorkerLink
from enginehouse.ports import Message
from enginehouse.worker.identity import Identity

BAR = 1.3
COUNTS = (1, 10, 50, 100)
IN_SEQUENCE = 4  # nodes of the loop that is run for comparison
WORK_SECONDS = 1.0
LIMIT_SECONDS = 30.0  # for everything that should take a second or two
TOKENS = {role: f"eh-bench-{role}-" + "0" * 32 for role in ("admin", "join")}


class StubWorker:
    """A worker whose installs take one second and do nothing."""

    def __init__(self, name: str, url: str, group: asyncio.TaskGroup) -> None:
        self._name = name
        self._link = WorkerLink(FrontendClient(url, TOKENS["join"], user_agent="bench"))
        self._group = group
        self._key = SigningKey.generate()
        self._bus: NatsBus | None = None
        self.tasks: list[asyncio.Task[None]] = []

    @property
    def public_key(self) -> str:
        return self._key.verify_key.encode().hex()

    async def join(self) -> None:
        request = node_api.RegisterRequest(
            name=self._name,
            address="127.0.0.1:50051",
            token=TOKENS["join"],
            platform="linux/amd64",
            capability="default",
            challenge=await self._link.challenge(),
        )
        reply = await self._link.register(Identity(self._key).signed(request))
        options = BusOptions(url=reply.nats_url, name=self._name, jwt=reply.nats_jwt, seed=reply.nats_user_seed)
        self._bus = await NatsBus.connect(options, limit_seconds=LIMIT_SECONDS)
        await self._bus.subscribe(subjects.node_subject(reply.id, subjects.INSTALL), self._take)
        heartbeat = node_api.HeartbeatRequest(report=Report(boot_id=self._name, sequence=1, mark=reply.mark))
        await self._link.heartbeat(reply.id, reply.node_token, heartbeat)

    def _take(self, message: Message) -> None:
        self.tasks.append(self._group.create_task(self._install(message)))

    async def _install(self, message: Message) -> None:
        assert self._bus is not None
        await asyncio.sleep(WORK_SECONDS)
        await self._bus.publish(message.reply, wire.encode(wire.BackendInstallReply(success=True)))

    async def leave(self) -> None:
        if self._bus is not None:
            await self._bus.close()


class Measured(NamedTuple):
    """Medians of wall times in seconds, from the request to the last outcome."""

    at_once: float
    in_sequence: float | None


async def measure(count: int, rounds: int, *, in_sequence: bool = False) -> Measured:
    with tempfile.TemporaryDirectory(prefix="fanout-") as scratch:
        for role, token in TOKENS.items():
            (Path(scratch) / f"{role}.token").write_text(token)
        url = f"http://127.0.0.1:{free_port()}"
        async with asyncio.TaskGroup() as group:
            workers = [StubWorker(f"stub-{number}", url, group) for number in range(count)]
            async with running_frontend(Path(scratch), url, [worker.public_key for worker in workers]):
                for worker in workers:
                    await worker.join()
                times = [await asyncio.to_thread(seconds_of_one_install, url) for _ in range(rounds)]
                loop = await asyncio.to_thread(seconds_in_sequence, url, count) if in_sequence else None
                for worker in workers:
                    await worker.leave()
    return Measured(statistics.median(times), loop)


def seconds_in_sequence(url: str, count: int) -> float:
    """The same, one node after the other."""
    return sum(seconds_of_one_install(url, (f"stub-{number}",)) for number in range(count))


@contextlib.asynccontextmanager
async def running_frontend(place: Path, url: str, approved_keys: Sequence[str]) -> AsyncIterator[None]:
    """A NATS server and a frontend of their own."""
    keys = credentials.load_or_create(place / "bus")
    server = embedded.prepare(place / "bus", keys, host="127.0.0.1", port=None, log_path=place / "nats.log")
    argv = [sys.executable, "-m", "enginehouse", "frontend", "--data", str(place), "--port", url.rpartition(":")[2]]
    argv += ["--nats-url", server.url, "--stale", "600s", "--approve-keys", ",".join(approved_keys)]
    async with contextlib.AsyncExitStack() as stack:
        for name, command in (("nats", server.argv), ("frontend", argv)):
            log = place / f"{name}.log"
            child = await processes.spawn(command, directory=place, environment=os.environ, log=log)
            stack.push_async_callback(processes.stop_group, child, LIMIT_SECONDS)
        await until_ready(FrontendClient(url, TOKENS["admin"], user_agent="bench"))
        yield


async def until_ready(client: FrontendClient) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:
        try:
            await asyncio.to_thread(client.request_bytes, "GET", "/readyz")
            return
        except EnginehouseError as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"the frontend did not become ready: {error}") from error
        await asyncio.sleep(0.05)


def seconds_of_one_install(url: str, nodes: tuple[str, ...] | None = None) -> float:
    client = FrontendClient(url, TOKENS["admin"], user_agent="bench")
    began = time.perf_counter()
    request = {"kind": "install", "name": "llama-cpp", "force": True, "nodes": nodes}
    operation = client.request("POST", "/api/operations", request, dict[str, object])
    with client.stream_events(f"/api/events?operation={operation['jobID']}") as events:
        for event in events:
            status = msgspec.json.decode(event.data, type=dict[str, object]).get("status")
            if status == "succeeded":
                return time.perf_counter() - began
            if status not in (None, "queued", "running"):
                raise SystemExit(f"the install {status}: {event.data.decode()}")
    raise SystemExit("the events of the install ended before it did")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def plot(times: dict[int, float], loop_seconds: float) -> str:
    """Wall time over nodes, both ways, as SVG: the loop is a straight line through what was measured."""
    width, height, left, bottom = 640, 360, 60, 40
    most, slowest = max(times), max(*times.values(), 12.0)

    def place(count: float, seconds: float) -> str:
        across = left + (width - left - 20) * count / most
        return f"{across:.0f},{height - bottom - (height - bottom - 20) * min(seconds, slowest) / slowest:.0f}"

    per_node = loop_seconds / IN_SEQUENCE
    shown = int(min(most, slowest / per_node))
    ours = " ".join(place(count, seconds) for count, seconds in times.items())
    theirs = " ".join(place(count, count * per_node) for count in (1, shown))
    labels = "".join(
        f'<text x="{place(count, 0).split(",")[0]}" y="{height - 15}" text-anchor="middle">{count}</text>'
        for count in times
    )
    ticks = "".join(
        f'<text x="{left - 8}" y="{place(0, second).split(",")[1]}" text-anchor="end">{second} s</text>'
        for second in range(0, int(slowest) + 1, 4)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">'
        f'<rect width="{width}" height="{height}" fill="white"/>{labels}{ticks}'
        f'<polyline points="{theirs}" fill="none" stroke="#c33" stroke-width="2" stroke-dasharray="6 4"/>'
        f'<polyline points="{ours}" fill="none" stroke="#07c" stroke-width="3"/>'
        f'<text x="{left + 120}" y="40" fill="#c33">one node after the other</text>'
        f'<text x="{left + 300}" y="{height - bottom - 60}" fill="#07c">all at once</text>'
        f'<text x="{width / 2:.0f}" y="{height - 2}" text-anchor="middle">nodes, one second of work each</text></svg>\n'
    )


def run_whole(name: str) -> bool:
    """Whether that benchmark holds."""
    sys.stdout.flush()
    return subprocess.call([sys.executable, str(Path(__file__).with_name(f"{name}.py"))]) == 0


async def main() -> int:
    parser = argparse.ArgumentParser(description="One install to many nodes, over one install to one.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under 50 s")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the times as SVG")
    given = parser.parse_args()
    rounds = 3 if given.quick else 9
    times = {count: (await measure(count, rounds)).at_once for count in COUNTS}
    for count, seconds in times.items():
        print(f"{count:3d} nodes: {seconds:.3f} s ({seconds / times[1]:.2f} x one node)")
    loop = (await measure(IN_SEQUENCE, 1, in_sequence=True)).in_sequence
    assert loop is not None
    print(f"{IN_SEQUENCE:3d} nodes one after the other: {loop:.3f} s ({loop / times[1]:.2f} x one node)")
    if given.plot is not None:
        given.plot.write_text(plot(times, loop))
    ratio = max(times.values()) / times[1]
    others_hold = given.quick or all([run_whole(name) for name in ("backlog", "watchers")])
    print(f"fanout: {ratio:.2f} (bar {BAR}: wall time of one install to up to {COUNTS[-1]} nodes over that to one)")
    return 0 if ratio <= BAR and others_hold else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
