"""What stands between the parts of a fleet: a way to the database that loses the answer to a commit, a balancer, and a
strait that may be closed.

All pass bytes on and run on the loop of the warehouse. The balancer asks /readyz as any balancer does, and sends a
connection to a frontend that said yes the last time; what is open stays where it is.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.fleet.warehouse import Warehouse

_CHUNK = 65536
_COMMIT = b"COMMIT\x00"
_DATABASE_SOCKET = ".s.PGSQL.5432"
_PROBE_SECONDS = 0.1
_PROBE_LIMIT_SECONDS = 2.0
_PICK_TRIES = 100


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while received := await reader.read(_CHUNK):
        writer.write(received)
        await writer.drain()


class CommitCutter:
    """A way to the database. `arm(word)`: of the next transaction that says the word the commit is carried out, and the
    connection is cut before its answer is passed on.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._word = b""
        self.cuts = 0

    def arm(self, word: bytes) -> None:
        self._word = word

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_unix_connection(self._path)
        try:
            async with asyncio.TaskGroup() as group:
                down = group.create_task(pass_on(there_reader, writer))
                last = await self._pass_up(reader, there_writer)
                down.cancel()
            if last:
                there_writer.write(last)
                # Its answer says that it was carried out; nobody else gets to see it.
                self.cuts += bool(await there_reader.read(_CHUNK))
        except* OSError:
            pass  # one of the two ends is gone
        finally:
            for end in (writer, there_writer):
                end.transport.abort()

    async def _pass_up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Until the client leaves, or says the commit that is to be cut off; that."""
        said = b""
        while received := await reader.read(_CHUNK):
            said = (said + received)[-2 * _CHUNK :]
            if _COMMIT in received:
                if self._word and self._word in said:
                    self._word = b""
                    return received
                said = b""
            writer.write(received)
            await writer.drain()
        return b""


@contextmanager
def cutting_commits(warehouse: Warehouse, directory: Path, real_directory: str) -> Iterator[CommitCutter]:
    """A socket in `directory` that leads to the server of `real_directory`."""
    cutter = CommitCutter(f"{real_directory}/{_DATABASE_SOCKET}")

    async def opened() -> asyncio.Server:
        return await asyncio.start_unix_server(cutter.accept, directory / _DATABASE_SOCKET)

    server = warehouse.run(opened())
    try:
        yield cutter
    finally:
        warehouse.call(server.close)


class Balancer:
    """`url` is one address for several frontends."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.url = ""
        self.ready: set[int] = set()
        self._ports = list(ports)
        self._turn = 0

    async def probe(self) -> None:
        while True:
            for port in self._ports:
                is_ready = await asyncio.to_thread(_is_ready, port)
                (self.ready.add if is_ready else self.ready.discard)(port)
            await asyncio.sleep(_PROBE_SECONDS)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            there_reader, there_writer = await self._connect()
            ends.append(there_writer)
            async with asyncio.TaskGroup() as group:
                both = [
                    group.create_task(pass_on(there_reader, writer)),
                    group.create_task(pass_on(reader, there_writer)),
                ]
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                for task in both:
                    task.cancel()
        except* OSError:
            pass  # one of the two ends is gone, which the other one notices by itself
        finally:
            for end in ends:
                end.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Another one where the first refuses: nothing has been said to it yet."""
        for _ in range(_PICK_TRIES):
            self._turn += 1
            ready = sorted(self.ready)
            first = self._turn % len(ready) if ready else 0
            for port in ready[first:] + ready[:first]:
                with suppress(OSError):
                    return await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(_PROBE_SECONDS)
        raise ConnectionRefusedError("nobody is ready")


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PROBE_LIMIT_SECONDS)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextmanager
def balanced(warehouse: Warehouse, ports: Sequence[int]) -> Iterator[Balancer]:
    balancer = Balancer(ports)

    async def opened() -> asyncio.Server:
        return await asyncio.start_server(balancer.accept, "127.0.0.1", 0)

    server = warehouse.run(opened())
    probing = warehouse.begin(balancer.probe())
    balancer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield balancer
    finally:
        probing.cancel()
        warehouse.call(server.close)


class Strait:
    """A way to a port, or to a socket of the file system. While it is closed nothing passes and nothing is refused, as
    where packets are lost; what was under way arrives afterwards.
    """

    def __init__(self, there: int | str) -> None:
        self.port = 0
        self._there = there
        self._is_open = asyncio.Event()
        self._is_open.set()

    def close(self) -> None:
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            await self._is_open.wait()
            there_reader, there_writer = await self._connect()
            ends.append(there_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(there_reader, writer))
                group.create_task(self._pass_on(reader, there_writer))
        except* OSError:
            pass  # one of the two ends is gone, which the other one notices by itself
        finally:
            for end in ends:
                end.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._there, str):
            return await asyncio.open_unix_connection(self._there)
        return await asyncio.open_connection("127.0.0.1", self._there)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while received := await reader.read(_CHUNK):
            await self._is_open.wait()
            writer.write(received)
            await writer.drain()
        await self._is_open.wait()
        writer.close()


@contextmanager
def strait_to_database(warehouse: Warehouse, directory: Path, real_directory: str) -> Iterator[Strait]:
    """A socket in `directory` that leads to the server of `real_directory`."""
    made = Strait(f"{real_directory}/{_DATABASE_SOCKET}")

    async def opened() -> asyncio.Server:
        return await asyncio.start_unix_server(made.accept, directory / _DATABASE_SOCKET)

    server = warehouse.run(opened())
    try:
        yield made
    finally:
        warehouse.call(made.open)
        warehouse.call(server.close)


@contextmanager
def strait(warehouse: Warehouse, there: int) -> Iterator[Strait]:
    made = Strait(there)

    async def opened() -> asyncio.Server:
        return await asyncio.start_server(made.accept, "127.0.0.1", 0)

    server = warehouse.run(opened())
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        warehouse.call(made.open)
        warehouse.call(server.close)
