"""The bus against a real nats-server with JWT accounts: who may say what, and what heals by itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.ports import free_port

from enginehouse.bus import credentials, embedded
from enginehouse.bus.nats import BusOptions, NatsBus
from enginehouse.bus.revocation import revoke
from enginehouse.core import subjects
from enginehouse.core.errors import Denied, Invalid, TooLarge, Unavailable
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.subjects import Permissions
from enginehouse.ports import Message

ONE = NodeId("n-1")
TWO = NodeId("n-2")
INTENT = IntentId("i")

OWN_INBOX = Permissions(publish=("_INBOX.>",), subscribe=("_INBOX.>",))


async def until_listening(port: int) -> None:
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110  # what it waits for is told by nobody
            await asyncio.sleep(0.01)


class World:
    """One server in a directory of its own, which a test may stop and start again."""

    def __init__(self, directory: Path) -> None:
        self.accounts = credentials.load_or_create(directory / "bus")
        with_free_port = free_port()
        self.server = embedded.prepare(
            directory / "bus", self.accounts, host="127.0.0.1", port=with_free_port, log_path=directory / "nats.log"
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._buses: list[NatsBus] = []

    async def start(self) -> None:
        # A child that the test kills, and must be able to kill without a running loop.
        self._process = subprocess.Popen(self.server.argv)  # noqa: ASYNC220
        await until_listening(self.server.port)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def connect(self, name: str, permissions: Permissions, **more: Callable[[], None]) -> NatsBus:
        made = credentials.mint_user(self.accounts.account_seed, name, permissions)
        options = BusOptions(url=self.server.url, name=name, jwt=made.jwt, seed=made.seed, **more)
        bus = await NatsBus.connect(options, limit_seconds=10)
        self._buses.append(bus)
        return bus

    async def worker(self, node_id: NodeId) -> NatsBus:
        return await self.connect(credentials.worker_name(node_id), subjects.worker_permissions(node_id))

    async def frontend(self, **more: Callable[[], None]) -> NatsBus:
        return await self.connect("enginehouse-frontend", subjects.frontend_permissions(), **more)

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()
        self.stop()


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[World]:
    world = World(directory)
    await world.start()
    try:
        yield world
    finally:
        await world.close()


class Inbox:
    def __init__(self) -> None:
        self._queue: asyncio.Queue[Message] = asyncio.Queue()

    def __call__(self, message: Message) -> None:
        self._queue.put_nowait(message)

    async def next(self) -> Message:
        return await asyncio.wait_for(self._queue.get(), 10)


async def test_a_command_reaches_its_node_and_its_reply_comes_back(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        frontend, worker = await world.frontend(), await world.worker(ONE)
        commands, replies, progress = Inbox(), Inbox(), Inbox()
        for verb in subjects.WORKER_SUBJECTS:
            await worker.subscribe(subjects.node_subject(ONE, verb), commands)
        await frontend.subscribe(subjects.ALL_REPLIES, replies)
        await frontend.subscribe(subjects.ALL_PROGRESS, progress)

        for verb in subjects.WORKER_SUBJECTS:
            await frontend.publish(
                subjects.node_subject(ONE, verb),
                b"{}",
                reply=subjects.reply_subject(ONE, INTENT, 1),
            )
            command = await commands.next()
            assert (command.subject, command.payload) == (subjects.node_subject(ONE, verb), b"{}")
            await worker.publish(subjects.progress_subject(ONE, "op"), b"half")
            assert (await progress.next()).payload == b"half"
            await worker.publish(command.reply, b"done")
            reply = await replies.next()
            assert (reply.subject, reply.payload, reply.no_responders) == (
                subjects.reply_subject(ONE, INTENT, 1),
                b"done",
                False,
            )


async def test_a_command_that_nobody_hears_is_told_at_once(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        frontend = await world.frontend()
        replies = Inbox()
        await frontend.subscribe(subjects.ALL_REPLIES, replies)
        await frontend.publish(
            subjects.node_subject(NodeId("gone"), subjects.INSTALL),
            b"{}",
            reply=subjects.reply_subject(ONE, INTENT, 3),
        )
        message = await replies.next()
        assert message.no_responders
        assert subjects.parse_reply_subject(message.subject) == subjects.ReplySubject(ONE, INTENT, 3)


async def test_a_worker_may_not_listen_to_another_node_or_to_all(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        worker = await world.worker(ONE)
        for subject in ("nodes.n-2.backend.install", "nodes.n-2.>", "nodes.*.backend.install", "nodes.>", ">"):
            with pytest.raises(Denied) as caught:
                await worker.subscribe(subject, Inbox())
            assert subject in caught.value.message
        await worker.subscribe("nodes.n-1.backend.install", Inbox())


async def test_a_worker_can_neither_command_a_node_nor_pretend_to_be_one(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        frontend, bad, good = await world.frontend(), await world.worker(ONE), await world.worker(TWO)
        commands, progress = Inbox(), Inbox()
        await good.subscribe(subjects.node_subject(TWO, subjects.INSTALL), commands)
        await frontend.subscribe(subjects.ALL_PROGRESS, progress)
        await bad.publish(subjects.node_subject(TWO, subjects.INSTALL), b"bad")
        await bad.publish(subjects.progress_subject(TWO, "op"), b"bad")
        await bad.publish(subjects.progress_subject(ONE, "op"), b"own")
        await frontend.publish(subjects.node_subject(TWO, subjects.INSTALL), b"good")
        assert (await progress.next()).payload == b"own"
        assert (await commands.next()).payload == b"good"


async def test_a_worker_can_neither_read_nor_forge_the_answers_of_another_node(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        frontend, bad, good = await world.frontend(), await world.worker(ONE), await world.worker(TWO)
        replies, polls = Inbox(), Inbox()
        await frontend.subscribe(subjects.ALL_REPLIES, replies)
        await frontend.subscribe(subjects.all_polls("f"), polls)
        theirs = (
            subjects.reply_subject(TWO, INTENT, 1),
            subjects.poll_subject(TWO, "f", subjects.LIST, 1),
        )
        for subject in (
            *theirs,
            subjects.ALL_REPLIES,
            subjects.all_polls("f"),
            "_INBOX.>",
            "_INBOX.eh.n-2.>",
            "_INBOX.*.*.>",
        ):
            with pytest.raises(Denied):
                await bad.subscribe(subject, Inbox())
        for subject in (*theirs, "_INBOX.eh.i.1", "_INBOX.anything"):
            await bad.publish(subject, b"forged")
        await bad.publish(subjects.reply_subject(ONE, IntentId("j"), 1), b"own")
        await good.publish(subjects.reply_subject(TWO, INTENT, 1), b"true")
        heard = {(await replies.next()).payload for _ in range(2)}
        assert heard == {b"own", b"true"}
        await good.publish(subjects.poll_subject(TWO, "f", subjects.LIST, 1), b"true")
        assert (await polls.next()).payload == b"true"


async def test_a_worker_answers_once_under_any_reply_subject_that_it_was_given(tmp_path: Path) -> None:
    """Of a frontend of another version, or of LocalAI's tools."""
    async with running(tmp_path) as world:
        worker = await world.worker(ONE)
        anybody = await world.connect("tool", Permissions(publish=("nodes.>",), subscribe=("_INBOX.tool.>",)))
        commands, replies = Inbox(), Inbox()
        await worker.subscribe(subjects.node_subject(ONE, subjects.LIST), commands)
        await anybody.subscribe("_INBOX.tool.>", replies)
        await worker.publish("_INBOX.tool.0", b"not asked")
        await anybody.publish(subjects.node_subject(ONE, subjects.LIST), b"{}", reply="_INBOX.tool.1")
        await worker.publish((await commands.next()).reply, b"asked")
        assert (await replies.next()).payload == b"asked"
        await worker.publish("_INBOX.tool.1", b"twice")
        await anybody.publish(subjects.node_subject(ONE, subjects.LIST), b"{}", reply="_INBOX.tool.2")
        await worker.publish((await commands.next()).reply, b"again")
        assert (await replies.next()).payload == b"again"


async def test_a_revoked_credential_is_cut_off_and_the_others_are_not(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        away, back = asyncio.Event(), asyncio.Event()
        made = credentials.mint_user(
            world.accounts.account_seed, "w", subjects.worker_permissions(ONE), life_seconds=60
        )
        options = BusOptions(
            url=world.server.url,
            name="w",
            jwt=made.jwt,
            seed=made.seed,
            on_connected=back.set,
            on_disconnected=away.set,
        )
        removed = await NatsBus.connect(options, limit_seconds=10)
        kept, frontend = await world.worker(TWO), await world.frontend()
        commands = Inbox()
        await kept.subscribe(subjects.node_subject(TWO, subjects.LIST), commands)
        back.clear()

        await revoke(world.server.url, world.accounts, {made.user: int(time.time())}, limit_seconds=5)

        await asyncio.wait_for(away.wait(), 5)
        await frontend.publish(subjects.node_subject(TWO, subjects.LIST), b"still here")
        assert (await commands.next()).payload == b"still here"
        with pytest.raises(Denied):
            await NatsBus.connect(
                BusOptions(url=world.server.url, name="w", jwt=made.jwt, seed=made.seed), limit_seconds=5
            )
        assert not back.is_set()
        await removed.close()
        # Approved again later: a credential of its own, and no more in the list.
        assert (await world.worker(ONE)).is_connected


async def test_a_credential_is_renewed_without_missing_a_message(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        frontend = await world.frontend()

        def made(seconds: float) -> credentials.MintedUser:
            permissions = subjects.worker_permissions(ONE)
            return credentials.mint_user(world.accounts.account_seed, "w", permissions, life_seconds=seconds)

        first, away = made(3), asyncio.Event()
        options = BusOptions(url=world.server.url, name="w", jwt=first.jwt, seed=first.seed, on_disconnected=away.set)
        worker = await NatsBus.connect(options, limit_seconds=10)
        heard: set[bytes] = set()
        await worker.subscribe(subjects.node_subject(ONE, subjects.LIST), lambda message: heard.add(message.payload))
        assert first.expires_at is not None
        number = 0

        async def speak_until(moment: float) -> None:
            nonlocal number
            while time.time() < moment:
                await frontend.publish(subjects.node_subject(ONE, subjects.LIST), b"%d" % number)
                number += 1
                await asyncio.sleep(0)

        second = made(60)
        async with asyncio.TaskGroup() as group:
            group.create_task(speak_until(first.expires_at + 1.5))
            await worker.renew(second.jwt, second.seed)
        await until(lambda: len(heard) == number)
        assert number > 10
        assert not away.is_set()
        await worker.close()


async def test_what_was_renewed_while_the_bus_was_away_is_used_when_it_is_back(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        permissions = subjects.worker_permissions(ONE)
        first = credentials.mint_user(world.accounts.account_seed, "w", permissions, life_seconds=2)
        back = asyncio.Event()
        options = BusOptions(url=world.server.url, name="w", jwt=first.jwt, seed=first.seed, on_connected=back.set)
        worker = await NatsBus.connect(options, limit_seconds=10)
        world.stop()
        ends_at = first.expires_at
        assert ends_at is not None
        await until(lambda: time.time() > ends_at + 1 and not worker.is_connected)
        await world.start()
        back.clear()
        second = credentials.mint_user(world.accounts.account_seed, "w", permissions, life_seconds=60)
        await worker.renew(second.jwt, second.seed)
        await asyncio.wait_for(back.wait(), 15)
        assert worker.is_connected
        await worker.close()


async def test_strangers_and_expired_credentials_are_refused_at_once(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        everything = Permissions(publish=(">",), subscribe=(">",))
        stranger = credentials.load_or_create(tmp_path / "other")
        foreign = credentials.mint_user(stranger.account_seed, "x", everything)
        expired = credentials.mint_user(world.accounts.account_seed, "x", everything, life_seconds=-9)
        own = credentials.mint_user(world.accounts.account_seed, "x", everything)
        pairs = [(one.jwt, one.seed) for one in (foreign, expired)]
        for jwt, seed in (*pairs, (own.jwt, foreign.seed), ("", "")):
            with pytest.raises(Denied):
                await NatsBus.connect(BusOptions(url=world.server.url, name="x", jwt=jwt, seed=seed), limit_seconds=10)


async def test_subscriptions_come_back_after_the_server_was_away(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        back, worker_back, away = asyncio.Event(), asyncio.Event(), asyncio.Event()
        frontend = await world.frontend(on_connected=back.set, on_disconnected=away.set)
        worker = await world.connect("w", subjects.worker_permissions(ONE), on_connected=worker_back.set)
        replies, commands = Inbox(), Inbox()
        await frontend.subscribe(subjects.ALL_REPLIES, replies)
        await worker.subscribe(subjects.node_subject(ONE, subjects.LIST), commands)
        back.clear()
        worker_back.clear()

        world.stop()
        await asyncio.wait_for(away.wait(), 10)
        with pytest.raises(Unavailable) as caught:
            await frontend.publish("nodes.n-1.backend.list", b"")
        assert caught.value.code == "bus_unavailable"
        assert not frontend.is_connected
        with pytest.raises(Unavailable):
            await frontend.subscribe("_INBOX.later", replies)

        await world.start()
        await asyncio.wait_for(back.wait(), 20)
        await asyncio.wait_for(worker_back.wait(), 20)
        await frontend.publish(
            subjects.node_subject(ONE, subjects.LIST),
            b"q",
            reply=subjects.reply_subject(ONE, INTENT, 1),
        )
        message = await commands.next()
        await worker.publish(message.reply, b"answer")
        assert (await replies.next()).payload == b"answer"


async def test_a_connection_that_the_server_closes_with_an_error_is_made_again(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        back = asyncio.Event()
        bus = await world.frontend(on_connected=back.set)
        inbox = Inbox()
        await bus.subscribe("_INBOX.eh.n-1.x.1", inbox)
        back.clear()
        # A protocol error makes the library close for good; nothing of ours can send one, so it is put on the wire
        # here.
        bus._client._transport.write(b"NONSENSE\r\n")  # type: ignore[union-attr]
        await asyncio.wait_for(back.wait(), 20)
        other = await world.worker(ONE)
        await other.publish("_INBOX.eh.n-1.x.1", b"still here")
        assert (await inbox.next()).payload == b"still here"


async def test_a_receiver_that_raises_is_logged_and_the_next_message_still_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path) as world:
        bus = await world.connect("own", OWN_INBOX)
        inbox = Inbox()

        def receive(message: Message) -> None:
            if message.payload == b"bad":
                raise KeyError("a bug")
            inbox(message)

        await bus.subscribe("_INBOX.x", receive)
        with caplog.at_level(logging.ERROR):
            await bus.publish("_INBOX.x", b"bad")
            await bus.publish("_INBOX.x", b"good")
            assert (await inbox.next()).payload == b"good"
        assert any("bus.receiver_failed" in record.message for record in caplog.records)


async def test_messages_of_one_subject_arrive_in_order(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        bus = await world.connect("own", OWN_INBOX)
        inbox = Inbox()
        await bus.subscribe("_INBOX.>", inbox)
        for number in range(5000):
            await bus.publish(f"_INBOX.{number % 7}", b"%d" % number)
        assert [int((await inbox.next()).payload) for _ in range(5000)] == list(range(5000))
        assert bus.dropped == 0


async def test_what_the_bus_cannot_carry_is_refused_here(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        bus = await world.connect("own", OWN_INBOX)
        with pytest.raises(TooLarge):
            await bus.publish("_INBOX.x", b"x" * (1024 * 1024 + 1))
        for subject in ("", "a b", "a\r\nPUB x 0\r\n\r\n"):
            with pytest.raises(Invalid):
                await bus.publish(subject, b"")
        with pytest.raises(Invalid):
            await bus.subscribe("_INBOX..x", Inbox())


async def test_no_server_is_told_after_the_callers_limit() -> None:
    port = embedded.choose_port("127.0.0.1", None)
    options = BusOptions(url=f"nats://127.0.0.1:{port}", name="x")
    with pytest.raises(Unavailable) as caught:
        await NatsBus.connect(options, limit_seconds=0.3)
    assert caught.value.code == "bus_unavailable"


async def test_a_late_server_is_waited_for(tmp_path: Path) -> None:
    world = World(tmp_path)
    try:
        async with asyncio.TaskGroup() as group:
            connecting = group.create_task(world.frontend())
            await asyncio.to_thread(os.stat, tmp_path)
            await world.start()
        assert connecting.result().is_connected
    finally:
        await world.close()


async def test_a_server_that_hangs_does_not_answer_although_it_is_connected(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        bus = await world.frontend()
        assert await bus.answers(10.0)
        assert world._process is not None
        world._process.send_signal(signal.SIGSTOP)
        try:
            is_answering = True
            for _ in range(50):  # its threads stop one after the other
                is_answering = is_answering and await bus.answers(0.2)
            assert not is_answering
            assert bus.is_connected
        finally:
            world._process.send_signal(signal.SIGCONT)
        assert await bus.answers(10.0)
