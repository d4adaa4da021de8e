"""Files of models from other nodes: real servers of workers beside peers that lie, stall, break and redirect."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
from tests.fetch.faults import Answer, Cut, Flip, Hang, Stall
from tests.fetch.faulty import Faulty, faulty
from tests.worker.http_server import door
from tests.worker.world import World, silent, until

from enginehouse.core.errors import Hopeless
from enginehouse.core.model import Model, ModelFile, holds
from enginehouse.core.peer import FilePeer
from enginehouse.core.ticket import for_file, make_ticket, ticket_key
from enginehouse.fetch.http.retries import RetryPolicy
from enginehouse.host import disk
from enginehouse.worker.http_server import model_files
from enginehouse.worker.http_server.server import WorkerHttpServer
from enginehouse.worker.models.peers import PATH, PeerPatience

CONTENT = os.urandom(1024) * (20 * 1024)  # 20 MiB: several parts
DIGEST = hashlib.sha256(CONTENT).hexdigest()
TOKEN = "the-token-of-that-node"
NOW = 1_000_000.0
FAST = PeerPatience(stall_seconds=0.5, ask_seconds=2.0, look_seconds=0.02, quiet_seconds=1.0, busy_seconds=1.0)


class Machines:
    """Workers on directories of their own; each serves its files."""

    def __init__(self, root: Path, stack: AsyncExitStack) -> None:
        self._root = root
        self._stack = stack

    async def add(self, name: str, patience: PeerPatience = FAST) -> World:
        made = World(self._root / name, allowed_hosts=("127.0.0.1",))
        fetcher = made.models._fetcher
        fetcher._sources = msgspec.structs.replace(fetcher._sources, patience=RetryPolicy(tries=2, factor=0.01))
        fetcher._patience = patience
        self._stack.push_async_callback(made.made.close)
        return made

    async def serve(self, world: World) -> FilePeer:
        """Serve its files; the peer that a frontend would name for them."""
        server = world.made.http_server
        port = await server.listen("127.0.0.1")
        self._stack.push_async_callback(server.close)
        server.joined(door.node(TOKEN))
        server.heard(NOW, is_bus_away=False)
        return peer(f"127.0.0.1:{port}")


def peer(address: str, sha256: str = DIGEST, token: str = TOKEN) -> FilePeer:
    return FilePeer(sha256, address, make_ticket(ticket_key(token), for_file(sha256), NOW))


def model(web: Faulty, name: str = "m") -> Model:
    file = ModelFile("model.gguf", f"{web.url}/model.gguf", DIGEST, len(CONTENT))
    return Model(name=name, backend="llama-cpp", files=(file,))


@pytest.fixture
async def machines(tmp_path: Path) -> AsyncIterator[Machines]:
    async with AsyncExitStack() as stack:
        yield Machines(tmp_path, stack)


@pytest.fixture
async def web() -> AsyncIterator[Faulty]:
    async with faulty() as server:
        server.files["/model.gguf"] = CONTENT
        yield server


@pytest.fixture
async def bad_peer() -> AsyncIterator[Faulty]:
    """A peer that has the file and gives it as a test plans."""
    async with faulty() as server:
        server.files[f"{PATH}{DIGEST}"] = CONTENT
        yield server


async def test_the_second_node_reads_from_the_first_and_the_source_is_not_asked(
    machines: Machines, web: Faulty
) -> None:
    first, second = await machines.add("first"), await machines.add("second")
    await first.models.pull(model(web), 1, silent)
    named = await machines.serve(first)
    asked = len(web.requests)
    # Another model with the same file: the digest counts, not the name.
    await second.models.pull(model(web, "other"), 1, silent, [named])
    assert len(web.requests) == asked, "not even for its size"
    assert second.models.check_files(model(web, "other")).read_bytes() == CONTENT
    assert web.bytes_sent("/model.gguf") == len(CONTENT)


async def test_who_is_later_waits_for_the_one_that_fetches_and_reads_from_it(machines: Machines, web: Faulty) -> None:
    first, second = await machines.add("first"), await machines.add("second")
    named = await machines.serve(first)
    web.bytes_per_second = 16 * 1024 * 1024
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(first.models.pull(model(web), 1, silent))
        await until(lambda: first.models.moved(DIGEST) is not None)
        group.create_task(second.models.pull(model(web), 1, silent, [named]))
    assert web.bytes_sent("/model.gguf") == len(CONTENT)
    assert holds(second.models.held_models(), model(web))
    assert first.models.moved(DIGEST) is None


async def test_nobody_waits_for_a_fetch_that_does_not_move(machines: Machines, web: Faulty) -> None:
    first, second = await machines.add("first"), await machines.add("second")
    named = await machines.serve(first)
    web.plan(Hang(), path="model.gguf", times=1)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        stuck = group.create_task(first.models.pull(model(web), 1, silent))
        await until(lambda: first.models.moved(DIGEST) is not None)
        await second.models.pull(model(web), 1, silent, [named])
        stuck.cancel()
    assert disk.sha256_of(second.models.check_files(model(web))) == DIGEST


@pytest.mark.parametrize("fault", [Cut(after_bytes=3_000_000), Stall(after_bytes=3_000_000)])
async def test_a_peer_that_ends_in_the_middle_is_left_and_its_bytes_are_kept(
    machines: Machines, web: Faulty, bad_peer: Faulty, fault: Cut | Stall
) -> None:
    bad_peer.plan(fault, method="GET", times=None)
    second = await machines.add("second")
    await second.models.pull(model(web), 1, silent, [peer(bad_peer.address)])
    assert disk.sha256_of(second.models.check_files(model(web))) == DIGEST
    assert bad_peer.bytes_sent() > 0
    assert web.bytes_sent("/model.gguf") < len(CONTENT), "what the peer gave is not asked for again"


async def test_a_peer_with_other_bytes_is_left_for_an_honest_one_and_the_source_gives_nothing(
    machines: Machines, web: Faulty, bad_peer: Faulty
) -> None:
    bad_peer.plan(Flip(at_byte=9_000_000), method="GET", times=None)
    first, second = await machines.add("first"), await machines.add("second")
    await first.models.pull(model(web), 1, silent)
    honest, before = await machines.serve(first), len(web.requests)
    await second.models.pull(model(web), 1, silent, [peer(bad_peer.address), honest])
    assert disk.sha256_of(second.models.check_files(model(web))) == DIGEST
    assert len(web.requests) == before


async def test_a_liar_alone_costs_one_more_transfer_and_never_its_bytes(
    machines: Machines, web: Faulty, bad_peer: Faulty
) -> None:
    bad_peer.plan(Flip(at_byte=17), method="GET", times=None)
    second = await machines.add("second")
    await second.models.pull(model(web), 1, silent, [peer(bad_peer.address)])
    assert disk.sha256_of(second.models.check_files(model(web))) == DIGEST
    assert web.bytes_sent("/model.gguf") == len(CONTENT)


async def test_wrong_bytes_of_an_earlier_run_are_not_blamed_on_the_source(
    machines: Machines, web: Faulty, bad_peer: Faulty
) -> None:
    bad_peer.plan(Flip(at_byte=17), method="GET", times=None)
    bad_peer.plan(Cut(after_bytes=2_000_000), method="GET", times=None)
    web.plan(Answer(status=404), path="model.gguf", times=None)
    second = await machines.add("second")
    with pytest.raises(Exception, match="cannot"):
        await second.models.pull(model(web), 1, silent, [peer(bad_peer.address)])
    web.forget_plans()
    await second.models.pull(model(web), 1, silent)
    assert disk.sha256_of(second.models.check_files(model(web))) == DIGEST


async def test_a_source_that_changed_is_still_refused(machines: Machines, web: Faulty) -> None:
    web.plan(Flip(at_byte=17), path="model.gguf", method="GET", times=None)
    second = await machines.add("second")
    with pytest.raises(Hopeless, match="was changed there"):
        await second.models.pull(model(web), 1, silent)


async def test_a_peer_that_redirects_leads_nowhere(machines: Machines, web: Faulty, bad_peer: Faulty) -> None:
    async with faulty() as canary:
        canary.files["/secret"] = CONTENT
        bad_peer.plan(Answer(302, headers={"location": f"{canary.url}/secret"}), times=None)
        second = await machines.add("second")
        # Both are named, so the address itself would be allowed.
        await second.models.pull(model(web), 1, silent, [peer(bad_peer.address), peer(canary.address)])
        assert canary.asked("/secret") == []
    assert web.bytes_sent("/model.gguf") == len(CONTENT)


async def test_a_slow_peer_is_left_for_the_source(machines: Machines, web: Faulty, bad_peer: Faulty) -> None:
    bad_peer.bytes_per_second = 200_000
    patience = msgspec.structs.replace(FAST, stall_seconds=5.0, pace_seconds=0.5, pace_bytes=20_000_000)
    second = await machines.add("second", patience)
    async with asyncio.timeout(20):
        await second.models.pull(model(web), 1, silent, [peer(bad_peer.address)])
    assert disk.sha256_of(second.models.check_files(model(web))) == DIGEST
    assert bad_peer.bytes_sent() < len(CONTENT) / 4


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "127.0.0.1", "http://127.0.0.1:80/x", "", "a b:1", "169.254.169.254:99999", "[::1]:1"]
)
async def test_an_address_that_is_none_or_where_nobody_listens_costs_only_a_moment(
    machines: Machines, web: Faulty, address: str
) -> None:
    second = await machines.add("second")
    async with asyncio.timeout(10):
        await second.models.pull(model(web), 1, silent, [peer(address)])
    assert web.bytes_sent("/model.gguf") == len(CONTENT)


async def test_without_the_right_ticket_a_peer_gives_nothing_and_the_source_is_used(
    machines: Machines, web: Faulty
) -> None:
    first, second = await machines.add("first"), await machines.add("second")
    await first.models.pull(model(web), 1, silent)
    named = await machines.serve(first)
    other = msgspec.structs.replace(named, ticket=make_ticket(ticket_key("another-node"), for_file(DIGEST), NOW))
    await second.models.pull(model(web), 1, silent, [other])
    assert web.bytes_sent("/model.gguf") == 2 * len(CONTENT)


async def test_a_busy_peer_is_waited_for(machines: Machines, web: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = await machines.add("first"), await machines.add("second")
    await first.models.pull(model(web), 1, silent)
    named = await machines.serve(first)
    server = first.made.http_server
    assert isinstance(server, WorkerHttpServer)
    answers = server._model_files
    monkeypatch.setattr(model_files, "MAX_TRANSFERS", 0)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        pulling = group.create_task(second.models.pull(model(web), 1, silent, [named]))
        await until(lambda: answers.refused > 2)
        assert not pulling.done()
        monkeypatch.setattr(model_files, "MAX_TRANSFERS", 16)
    assert web.bytes_sent("/model.gguf") == len(CONTENT)


async def test_two_models_of_one_node_with_the_same_file_fetch_it_once(machines: Machines, web: Faulty) -> None:
    first = await machines.add("first")
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for name in ("one", "two"):
            group.create_task(first.models.pull(model(web, name), 1, silent))
    assert web.bytes_sent("/model.gguf") == len(CONTENT)
    assert all(holds(first.models.held_models(), model(web, name)) for name in ("one", "two"))
