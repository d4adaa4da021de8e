"""What a frontend finds when it is asked how everything is: database, NATS, clock, disk, galleries, and every node.

It only looks: every question has a limit, nothing is written, and what cannot be asked is a finding too. Whether a node
can be reached is tried from here, because the other direction is what its heartbeats prove.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

from enginehouse.core.address import Endpoint, parse_endpoint
from enginehouse.core.errors import EnginehouseError
from enginehouse.core.finding import Finding, clock_finding, disk_finding
from enginehouse.core.ids import NodeId
from enginehouse.core.node import Node
from enginehouse.core.progress import format_bytes
from enginehouse.frontend.fleet.node_http import refusal_of
from enginehouse.frontend.fleet.nodes import AddressRules, find_node
from enginehouse.frontend.galleries import Galleries
from enginehouse.host.blocking import in_thread
from enginehouse.ports import Bus
from enginehouse.store import db, nodes
from enginehouse.store.db import Connection, Store

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 2.0  # of NATS, which answers within milliseconds
AT_ONCE = 32  # nodes that are tried at the same time
SLOW_SECONDS = 0.5  # of a database that is asked for the time only


class Diagnosis:
    def __init__(self, store: Store, bus: Bus, galleries: Galleries, addresses: AddressRules, data: Path) -> None:
        self._store = store
        self._bus = bus
        self._galleries = galleries
        self._addresses = addresses
        self._data = data

    async def look(self) -> list[Finding]:
        found, every, now = await self._database()
        found.append(await self._nats())
        found.append(await in_thread(self._disk))
        found += self._unread()
        trying = asyncio.Semaphore(AT_ONCE)

        async def about(node: Node) -> list[Finding]:
            async with trying:
                return await self._node(node, now)

        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(about(node)) for node in every]
        for task in asked:
            found += task.result()
        if not every and now:
            found.append(
                Finding(area="node", level="note", message="no nodes yet", advice="Join one: enginehouse join URL")
            )
        return found

    async def reach(self, node_id: NodeId) -> Finding:
        """Whether this frontend reaches one node, for its worker, which can try the other direction only."""

        def work(connection: Connection) -> Node:
            return find_node(connection, node_id)

        return await self._reach(await self._store.read(work))

    async def _database(self) -> tuple[list[Finding], list[Node], float]:
        def work(connection: Connection) -> tuple[list[Node], float]:
            return nodes.every(connection), db.now(connection)

        began = time.monotonic()
        try:
            every, now = await self._store.read(work)
        except EnginehouseError as error:
            return (
                [
                    Finding(
                        area="database",
                        level="problem",
                        message=error.message,
                        advice="Check that it runs, and its disk; the log has its own words: enginehouse logs frontend",
                    )
                ],
                [],
                0.0,
            )
        took = time.monotonic() - began
        answers = Finding(
            area="database",
            level="note" if took > SLOW_SECONDS else "ok",
            message=f"answers after {took * 1000:.0f} ms",
            advice="A busy disk or a slow link; bench it, or move the database" if took > SLOW_SECONDS else "",
        )
        clock = clock_finding("the clock of this frontend", "the clock of the database", time.time() - now)
        return [answers, clock], every, now

    async def _nats(self) -> Finding:
        if await self._bus.answers(ANSWER_SECONDS):
            return Finding(area="nats", level="ok", message="answers")
        is_silent = f"NATS does not answer within {ANSWER_SECONDS:g} s"
        return Finding(
            area="nats",
            level="problem",
            message=(is_silent if self._bus.is_connected else "the frontend has no connection to NATS")
            + ": nodes get no commands",
            advice="Check that the server runs: enginehouse logs nats",
        )

    def _disk(self) -> Finding:
        usage = shutil.disk_usage(self._data)
        return disk_finding(f"data of the server ({self._data})", usage.free, usage.total, format_bytes(usage.free))

    def _unread(self) -> list[Finding]:
        return [
            Finding(
                area="gallery",
                level="note",
                message=f"the gallery {one.name} was never read: {one.error or 'not yet'}",
                advice="Its entries are missing until then; without internet, configure a mirror or a file",
            )
            for one in self._galleries.states()
            if one.status == "never loaded"
        ]

    async def _node(self, node: Node, now: float) -> list[Finding]:
        name = node.name
        if not node.approved:
            approve = f"Compare its fingerprint, then: enginehouse nodes approve {name}"
            return [Finding(area="node", level="problem", message=f"{name} asks to join", advice=approve)]
        if node.health == "offline":
            silent = format_age(now - node.last_heartbeat)
            advice = f"Start its worker, or: enginehouse nodes remove {name}"
            message = f"{name} is offline: no heartbeat for {silent}"
            return [Finding(area="node", level="problem", message=message, advice=advice)]
        found = [self._health(node)]
        found += [
            Finding(
                area="node",
                level="problem",
                message=f"{one.model_id} does not stay up on {name}: {one.message}",
                advice=f"See why: enginehouse logs {name} {one.model_id}",
            )
            for one in node.report.failed
        ]
        if node.capacity.total_disk:
            free = node.capacity.available_disk or 0
            found.append(disk_finding(name, free, node.capacity.total_disk, format_bytes(free)))
        return [*found, *self._graphics(node), await self._reach(node)]

    def _health(self, node: Node) -> Finding:
        if node.is_degraded:
            return Finding(
                area="node",
                level="problem",
                message=f"{node.name} sends heartbeats, but commands do not reach it",
                advice="Open the port of NATS between it and the server; see docs/network.md",
            )
        if node.health == "unhealthy":
            return Finding(
                area="node",
                level="problem",
                message=f"{node.name} is unhealthy: its heartbeats come late",
                advice=f"Look at its load and its link: enginehouse logs worker --node {node.name}",
            )
        return Finding(area="node", level="ok", message=f"{node.name} is healthy{', drained' * node.drained}")

    def _graphics(self, node: Node) -> list[Finding]:
        """Graphics cards that no installed build uses."""
        found = []
        for one in node.report.backends:
            if one.is_meta or one.is_broken:
                continue
            try:
                remark = self._galleries.resolve(one.name, node).remark or self._remark_by_alias(one.name, node)
            except EnginehouseError:
                continue
            if remark:
                found.append(
                    Finding(area="graphics", level="note", message=f"{one.name} on {node.name}", advice=remark)
                )
        return found

    def _remark_by_alias(self, directory: str, node: Node) -> str:
        """That of the names that led to a build, such as llama-cpp to xllamacpp."""
        for meta in self._galleries.metas_of(directory):
            build = self._galleries.resolve(meta, node)
            if build.directory == directory and build.remark:
                return build.remark
        return ""

    async def _reach(self, node: Node) -> Finding:
        """Whether this frontend reaches the HTTP port of a worker, on which logs and files are read."""
        why = refusal_of(node, self._addresses)
        if not why:
            target = parse_endpoint(node.http_address)
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await _ask_health(target)
                return Finding(area="reach", level="ok", message=f"{node.name} is reached at {node.http_address}")
            except TimeoutError:
                why = f"no answer from {node.http_address} within {CONNECT_SECONDS:g} s"
            except OSError as error:
                why = f"{node.http_address}: {error.strerror or error}"
        return Finding(
            area="reach",
            level="problem",
            message=f"{node.name} is not reached from the server: {why}",
            advice="Open its ports in the firewall, or give its worker an address that is reached: --advertise-host",
        )


async def _ask_health(target: Endpoint) -> None:
    """Ask for its health, because the kernel accepts connections for a process that is frozen too."""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
        if not await reader.read(1):
            raise ConnectionError("it closed the connection without an answer")
    finally:
        writer.close()


def format_age(seconds: float) -> str:
    whole = max(0, int(seconds))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if whole >= size:
            return f"{whole // size} {unit}"
    return f"{whole} s"
