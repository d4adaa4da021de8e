"""The whole worker with a bus and a frontend in memory: joins, listens, reports, leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from itertools import islice
from pathlib import Path

import msgspec
import pytest
from nacl.signing import SigningKey, VerifyKey
from tests.bus.memory import MemoryBus
from tests.worker.whole_worker import WholeWorker, command, start, working
from tests.worker.world import MemoryLink, ask, link_tree, tiny_chat, until, xllamacpp

from enginehouse.core import node_api, subjects, wire
from enginehouse.core.errors import Unauthenticated, Unavailable
from enginehouse.core.ids import NodeId
from enginehouse.core.node import registration_message
from enginehouse.host import hardware, processes
from enginehouse.host.graphics import Graphics
from enginehouse.worker import agent
from enginehouse.worker import registration as joining
from enginehouse.worker.backends.installation import InstallerOptions
from enginehouse.worker.identity import Identity, IdentityFiles
from enginehouse.worker.options import WorkerOptions
from enginehouse.worker.parts import NoHttpServer


async def test_it_registers_with_a_signature_and_its_own_address_and_keeps_its_key_private(tmp_path: Path) -> None:
    async with working(WholeWorker(tmp_path)) as worker:
        request = worker.link.registrations[-1]
        assert request.address == f"127.0.0.1:{worker.place.base_port}"
        assert request.token == "join"
        key = VerifyKey(bytes.fromhex(request.public_key))
        assert request.challenge.startswith("challenge-")
        assert request.http_address == f"127.0.0.1:{int(request.address.rpartition(':')[2]) - 1}"
        addresses = (request.address, request.http_address)
        message = registration_message("node-one", request.public_key, addresses, request.challenge)
        key.verify(message, bytes.fromhex(request.signature))
        assert stat.S_IMODE(worker.place.node_key.stat().st_mode) == 0o600
        kept = msgspec.json.decode(worker.place.node_file.read_bytes())
        assert (kept["id"], kept["name"]) == ("node-1", "node-one")
        assert set(kept) == {"id", "name", "frontends", "nats_url"}
    assert worker.link.deregistered == ["node-1"]
    assert worker.bus.is_closed
    again = WholeWorker(tmp_path)
    async with working(again):
        assert again.link.registrations[-1].public_key == request.public_key


async def test_it_registers_with_everything_that_a_frontend_of_localai_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Graphics(vendor="nvidia", total_bytes=2**34, free_bytes=2**33, compute_capability="12.1")
    monkeypatch.setattr(hardware._graphics, "look", lambda: card)
    identity = Identity(SigningKey(bytes(32)))
    place = WorkerOptions(
        directory=tmp_path,
        name="node-one",
        max_replicas_per_model=3,
        installing=InstallerOptions(backends=tmp_path / "backends"),
    )
    place.make_directories()
    files = IdentityFiles(place.node_key, place.node_file, place.waiting_file)
    desk = joining.Desk(
        machine=hardware, link=MemoryLink(), identity=identity, serve=NoHttpServer().listen, node_files=files
    )
    request = joining.registration(place, desk, joining.NodeAddresses("10.0.0.1"), "challenge")
    assert (request.gpu_vendor, request.gpu_compute_capability) == ("nvidia", "12.1")
    assert (request.max_replicas_per_model, request.labels["node.replica-slots"]) == (3, "3")
    assert request.http_address == "", "nothing listens there"
    serving = joining.registration(place, desk, joining.NodeAddresses("fd00::1", 50050), "challenge")
    assert (serving.address, serving.http_address) == ("[fd00::1]:50051", "[fd00::1]:50050")


async def test_a_pending_worker_asks_again_until_it_is_approved(tmp_path: Path) -> None:
    worker = WholeWorker(tmp_path, statuses=["pending", "pending"])
    async with working(worker):
        assert len(worker.link.registrations) == 3
        assert len(worker.buses) == 1


async def test_a_worker_that_waited_for_approval_does_not_call_its_bus_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first heartbeat waits for the bus as that of any other worker, however long the approval took."""
    monkeypatch.setattr(joining, "pending_pauses", lambda: iter([1.0]))
    monkeypatch.setattr(agent, "OPENING_SECONDS", 0.9)  # less than that
    worker = WholeWorker(tmp_path, statuses=["pending", "pending"])
    opened = worker._open

    async def open_bus(registered: node_api.RegisterReply) -> MemoryBus:
        for _ in range(50):
            await asyncio.sleep(0)  # whatever else is ready goes first
        return await opened(registered)

    worker.agent._open_bus = open_bus
    async with working(worker):
        assert [one.bus for one in worker.link.heartbeats] == [""]


async def test_a_refused_worker_ends_with_the_error(tmp_path: Path) -> None:
    worker = WholeWorker(tmp_path)
    worker.link.fails = Unauthenticated("cannot register: the token is wrong")
    with pytest.raises(Unauthenticated):
        await worker.agent.run()
    assert worker.link.deregistered == []


async def test_a_worker_that_was_accepted_comes_back_by_its_key_and_never_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joining, "REFUSED_FIRST_SECONDS", 0.01)
    async with working(WholeWorker(tmp_path)) as first:
        assert set(first.link.by_key) == {False}
    worker = WholeWorker(tmp_path)
    worker.link.fails = Unauthenticated("cannot accept this token: it is unknown here")
    waiting = worker.place.waiting_file
    async with asyncio.TaskGroup() as group:
        task = group.create_task(worker.agent.run())
        await until(lambda: len(worker.link.by_key) >= 6)
        # By its key first, then by the token that may be good for more; and again.
        assert worker.link.by_key[:4] == [True, False, True, False]
        assert msgspec.json.decode(waiting.read_bytes())["reason"] == worker.link.fails.message
        assert sum("worker.refused" in line and "again_in_seconds=" in line for line in caplog.messages) >= 2
        assert not any("worker.waiting" in line for line in caplog.messages)  # it was said already
        worker.link.fails = None
        await until(lambda: bool(worker.link.heartbeats))
        assert not waiting.exists()
        worker.agent.stop()
        await task


def test_a_worker_that_is_refused_asks_ever_more_seldom_and_every_minute_at_least() -> None:
    pauses = list(islice(joining.refused_pauses(), 20))
    assert pauses[0] < 3 < pauses[2]
    assert max(pauses) <= 72


async def test_a_worker_without_a_token_proves_itself_by_its_key(tmp_path: Path) -> None:
    worker = WholeWorker(tmp_path)
    worker.agent._options = msgspec.structs.replace(worker.place, join_token="")
    async with working(worker):
        assert set(worker.link.by_key) == {True}
        assert worker.link.registrations[0].token == ""


async def test_a_frontend_that_is_away_is_asked_again(tmp_path: Path) -> None:
    worker = WholeWorker(tmp_path)
    worker.link.fails = Unavailable("cannot reach the frontend")
    async with asyncio.TaskGroup() as group:
        task = group.create_task(worker.agent.run())
        await until(lambda: len(worker.link.registrations) >= 2)
        worker.link.fails = None
        await until(lambda: bool(worker.link.heartbeats))
        worker.agent.stop()
        await task


async def test_it_stops_at_once_while_it_looks_for_its_bus(tmp_path: Path) -> None:
    worker = WholeWorker(tmp_path)
    looking, is_left = asyncio.Event(), asyncio.Event()

    async def open_bus(_registered: node_api.RegisterReply) -> MemoryBus:
        looking.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_left.set()
        raise AssertionError("nobody sets it")

    worker.agent._open_bus = open_bus
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(worker.agent.run())
        await looking.wait()
        worker.agent.stop()
    assert is_left.is_set()
    assert worker.link.deregistered == []


async def test_the_whole_thread_install_pull_start_ask_stop_delete(tmp_path: Path) -> None:
    async with working(WholeWorker(tmp_path)) as worker:
        install = wire.BackendInstallRequest(
            backend="llama-cpp", op_id="op", command=command("install"), resolved=xllamacpp()
        )
        assert (await worker.tell(subjects.INSTALL, install)).success
        pull = wire.ModelPullRequest(model=tiny_chat(), op_id="op", command=command("pull"))
        assert (await worker.tell(subjects.PULL_MODEL, pull)).success
        started = await worker.tell(subjects.INSTALL, start())
        assert started.success
        assert await asyncio.to_thread(ask, started.address, "What is the capital of France?") == (
            "The capital of France is Paris."
        )
        await until(lambda: len(worker.report.replicas) == 1 and len(worker.report.results) == 3)
        assert worker.report.replicas[0].address == started.address
        assert [model.name for model in worker.report.models] == ["tiny-chat"]
        progress = [to for to, _ in worker.bus.said if to == subjects.progress_subject(NodeId("node-1"), "op")]
        assert len(progress) >= 3
        stop = wire.ModelStopRequest(
            model_name="tiny-chat", process_key="tiny-chat#0", expected_address="", command=command("stop", 2)
        )
        assert (await worker.tell(subjects.STOP_MODEL, stop)).terminated
        delete = wire.BackendDeleteRequest(backend="xllamacpp", command=command("delete", 2))
        assert (await worker.tell(subjects.DELETE, delete)).success
        await until(lambda: worker.report.backends == () and worker.report.replicas == ())


async def test_the_death_of_an_engine_is_reported_within_a_second(tmp_path: Path, installed_tree: Path) -> None:
    worker = WholeWorker(tmp_path)
    worker.place.make_directories()
    link_tree(installed_tree, worker.place.backends / "xllamacpp")
    async with working(worker):
        pull = wire.ModelPullRequest(model=tiny_chat(), op_id="op", command=command("pull"))
        assert (await worker.tell(subjects.PULL_MODEL, pull)).success
        assert (await worker.tell(subjects.INSTALL, start())).success
        await until(lambda: len(worker.report.replicas) == 1)
        ((pid, _),) = processes.processes_with_nonce(worker.report.replicas[0].nonce)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: worker.report.replicas == (), limit_seconds=1.0)


async def test_reports_are_numbered_and_carry_the_last_mark(tmp_path: Path) -> None:
    async with working(WholeWorker(tmp_path)) as worker:
        await until(lambda: len(worker.link.heartbeats) >= 3)
        reports = [heartbeat.report for heartbeat in worker.link.heartbeats[:3]]
        assert [(one.sequence, one.mark) for one in reports if one] == [(1, 0.0), (2, 1.0), (3, 2.0)]
        assert len({one.boot_id for one in reports if one}) == 1
        assert worker.link.heartbeats[0].available_ram


async def test_heartbeats_tell_the_cores_in_use_once_there_is_something_to_compare(tmp_path: Path) -> None:
    async with working(WholeWorker(tmp_path)) as worker:
        await until(lambda: worker.link.heartbeats[-1].used_cores is not None)
        assert 0 <= (worker.link.heartbeats[-1].used_cores or 0.0) <= hardware.cores()


async def test_a_report_is_sent_whole_until_it_is_confirmed_and_whenever_it_has_changed(tmp_path: Path) -> None:
    async with working(WholeWorker(tmp_path)) as worker:
        link = worker.link
        await until(lambda: len(link.heartbeats) >= 3)
        assert all(one.report is not None and one.unchanged is None for one in link.heartbeats)
        link.confirms = True
        await until(lambda: link.heartbeats[-1].unchanged is not None)
        whole = next(one for one in reversed(link.heartbeats) if one.report is not None)
        unchanged = link.heartbeats[-1].unchanged
        assert whole.report is not None
        assert unchanged is not None
        assert link.heartbeats[-1].report is None
        assert link.heartbeats[-1].report_digest == whole.report_digest
        assert unchanged.sequence > whole.report.sequence
        assert unchanged.mark > whole.report.mark
        assert link.heartbeats[-1].available_ram
        pull = wire.ModelPullRequest(model=tiny_chat(), op_id="op", command=command("pull"))
        assert (await worker.tell(subjects.PULL_MODEL, pull)).success
        await until(lambda: any(one.report is not None and one.report.models for one in link.heartbeats))
        await until(lambda: link.heartbeats[-1].unchanged is not None)


async def test_a_report_that_is_no_longer_confirmed_is_sent_whole_at_once(tmp_path: Path) -> None:
    """Another frontend may never have had it, or the answer was lost."""
    async with working(WholeWorker(tmp_path)) as worker:
        link = worker.link
        link.confirms = True
        await until(lambda: link.heartbeats[-1].unchanged is not None)
        link.confirms = False
        await until(lambda: link.heartbeats[-1].report is not None)
        link.confirms = True
        await until(lambda: link.heartbeats[-1].unchanged is not None)
        link.loses = 1
        await until(lambda: link.loses == 0)
        lost = len(link.heartbeats)
        await until(lambda: len(link.heartbeats) > lost)
        assert link.heartbeats[lost].report is not None


async def test_a_disk_that_cannot_be_read_makes_no_node_silent_and_no_report_wrong(tmp_path: Path) -> None:
    async with working(WholeWorker(tmp_path)) as worker:
        await until(lambda: worker.link.heartbeats[-1].report is not None)
        aside = worker.place.models.rename(tmp_path / "aside")
        worker.place.models.touch()  # reading it is an error now
        await until(lambda: worker.link.heartbeats[-1].report is None)
        worker.place.models.unlink()
        aside.rename(worker.place.models)
        await until(lambda: worker.link.heartbeats[-1].report is not None)


async def test_heartbeats_go_on_while_the_bus_is_away_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "OPENING_SECONDS", 0.2)
    async with working(WholeWorker(tmp_path)) as worker:
        await until(lambda: worker.link.heartbeats[-1].bus == "" and worker.report.sequence >= 1)
        worker.bus.is_connected = False
        await until(lambda: len(worker.link.heartbeats) >= 4 and worker.link.heartbeats[-2].bus == "away")
        assert worker.link.heartbeats[-1].report is not None
        worker.bus.is_connected = True
        await until(lambda: worker.link.heartbeats[-1].bus == "")


async def test_a_worker_does_not_join_again_for_want_of_a_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To register again would end a drain at a frontend of LocalAI's, and what this worker is doing."""
    monkeypatch.setattr(agent, "FAR_AWAY_SECONDS", 0.2)
    async with working(WholeWorker(tmp_path)) as worker:
        joined = len(worker.link.registrations)
        worker.bus.is_connected = False
        heard = len(worker.link.heartbeats)
        await until(lambda: len(worker.link.heartbeats) >= heard + 5)
        assert worker.link.heartbeats[-1].bus == "away"
        assert not worker.link.heartbeats[-1].renew
        worker.bus.is_connected = True
        await until(lambda: worker.link.heartbeats[-1].bus == "")
        assert (len(worker.link.registrations), len(worker.buses)) == (joined, 1)


async def test_a_credential_that_ended_makes_it_join_again_where_nobody_renews_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "FAR_AWAY_SECONDS", 0.2)
    async with working(WholeWorker(tmp_path)) as worker:
        joined = len(worker.link.registrations)
        worker.bus.is_connected, worker.bus.is_refused = False, True
        await until(lambda: len(worker.buses) == 2)
        assert len(worker.link.registrations) == joined + 1


async def test_a_heartbeat_renews_the_credential_and_the_token_before_they_end(tmp_path: Path) -> None:
    worker = WholeWorker(tmp_path)
    worker.link.life_seconds = 0.8
    async with working(worker):
        joined = len(worker.link.registrations)
        await until(lambda: any(one.renew for one in worker.link.heartbeats))
        first = next(number for number, one in enumerate(worker.link.heartbeats) if one.renew)
        assert not any(one.renew for one in worker.link.heartbeats[: first - 1])
        await until(lambda: worker.bus.renewed == [("jwt-1", "seed-1")])
        worker.link.life_seconds = 600.0
        await until(lambda: worker.link.tokens[-1] == "token-2" or worker.link.tokens[-1] == "token-3")
        heard = len(worker.link.heartbeats)
        await until(lambda: len(worker.link.heartbeats) >= heard + 3)
        assert not worker.link.heartbeats[-1].renew
        assert (len(worker.link.registrations), len(worker.buses)) == (joined, 1)


async def test_a_bus_that_has_moved_is_found_through_the_frontend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "FAR_AWAY_SECONDS", 0.2)
    worker = WholeWorker(tmp_path)
    worker.link.life_seconds = 600.0
    async with working(worker):
        worker.bus.is_connected = False
        worker.link.nats_url = "nats://elsewhere:4222"
        await until(lambda: len(worker.buses) == 2)
        await until(lambda: worker.link.heartbeats[-1].bus == "")


async def test_a_worker_that_never_had_its_bus_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "OPENING_SECONDS", 0.2)
    worker = WholeWorker(tmp_path)

    async def open_bus(_registered: node_api.RegisterReply) -> MemoryBus:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    worker.agent._open_bus = open_bus
    async with working(worker):
        assert {one.bus for one in worker.link.heartbeats} == {"away"}
    assert worker.link.deregistered == ["node-1"]


async def test_a_forgotten_worker_joins_again_and_its_engines_go_on(tmp_path: Path, installed_tree: Path) -> None:
    worker = WholeWorker(tmp_path)
    worker.place.make_directories()
    link_tree(installed_tree, worker.place.backends / "xllamacpp")
    async with working(worker):
        pull = wire.ModelPullRequest(model=tiny_chat(), op_id="op", command=command("pull"))
        await worker.tell(subjects.PULL_MODEL, pull)
        await worker.tell(subjects.INSTALL, start())
        await until(lambda: len(worker.report.replicas) == 1)
        nonce = worker.report.replicas[0].nonce
        worker.link.forgets = True
        await until(lambda: len(worker.buses) == 2)
        count = len(worker.link.heartbeats)
        await until(lambda: len(worker.link.heartbeats) > count)
        assert [replica.nonce for replica in worker.report.replicas] == [nonce]
        assert worker.buses[0].is_closed


@pytest.mark.parametrize(
    "verb", [subjects.INSTALL, subjects.UPGRADE, subjects.DELETE, subjects.STOP_MODEL, subjects.PULL_MODEL]
)
@pytest.mark.parametrize("payload", [b"", b"{", b'{"backend": 3}', b"\xff", b"null", b"{}"])
async def test_a_malformed_message_gets_an_error_and_harms_nothing(tmp_path: Path, verb: str, payload: bytes) -> None:
    async with working(WholeWorker(tmp_path)) as worker:
        answer = await worker.bus.ask(subjects.node_subject(NodeId("node-1"), verb), payload, "r")
        reply = wire.decode(answer, wire.AnyReply, "the reply")
        assert not reply.success
        assert not reply.terminated
        assert reply.error.startswith("cannot ")
        answer = await worker.bus.ask(subjects.node_subject(NodeId("node-1"), subjects.LIST), b"{}", "r")
        assert wire.decode(answer, wire.BackendListReply, "the list").backends == ()


async def test_messages_of_a_go_frontend_are_understood(tmp_path: Path, installed_tree: Path) -> None:
    worker = WholeWorker(tmp_path)
    worker.place.make_directories()
    link_tree(installed_tree, worker.place.backends / "xllamacpp")
    async with working(worker):
        for name in ("llama-cpp", "localai@llama-cpp", "xllamacpp"):
            assert (await worker.tell(subjects.INSTALL, wire.BackendInstallRequest(backend=name))).success
        unknown = await worker.tell(subjects.INSTALL, wire.BackendInstallRequest(backend="vllm"))
        assert "cannot find a backend named 'vllm'" in unknown.error
        for uri, code in (
            ("file:///etc", "uri_not_allowed"),
            ("127.0.0.1:9/x:y", "uri_not_allowed"),
            ("X", "invalid_uri"),
        ):
            external = await worker.tell(subjects.INSTALL, wire.BackendInstallRequest(backend="", uri=uri, name="x"))
            assert external.outcome is not None
            assert external.outcome.code == code
        model = await worker.tell(subjects.INSTALL, wire.BackendInstallRequest(backend="llama-cpp", model_id="m"))
        assert "speaks OpenAI's HTTP API, which only Enginehouse frontends use" in model.error
        answer = await worker.bus.ask(subjects.node_subject(NodeId("node-1"), subjects.RUNNING), b"{}", "r")
        assert wire.decode(answer, wire.ModelsRunningReply, "what runs").models == ()
        stop = wire.ModelStopRequest(model_name="m", process_key="m#0", expected_address="127.0.0.1:1")
        assert (await worker.tell(subjects.STOP_MODEL, stop)).terminated
        assert (await worker.tell(subjects.DELETE, wire.BackendDeleteRequest(backend="llama-cpp"))).success
        absent = await worker.tell(subjects.DELETE, wire.BackendDeleteRequest(backend="llama-cpp"))
        assert not absent.success


async def test_stopping_in_the_middle_of_an_install_leaves_nothing_half_done(tmp_path: Path) -> None:
    worker = WholeWorker(tmp_path)
    async with working(worker):
        install = wire.BackendInstallRequest(backend="llama-cpp", command=command("install"), resolved=xllamacpp())
        await worker.bus.publish(subjects.node_subject(NodeId("node-1"), subjects.INSTALL), wire.encode(install), "r")
        await until(lambda: (worker.place.backends / ".enginehouse" / "staging" / "xllamacpp").exists())
    assert [path.name for path in worker.place.backends.iterdir()] == [".enginehouse"]
    assert worker.bus.replies("r") == []
    assert (worker.place.journal / "journal.jsonl").read_bytes().count(b"result") == 0


async def test_the_report_says_how_engines_are_confined(tmp_path: Path) -> None:
    worker = WholeWorker(tmp_path)
    async with working(worker):
        await until(lambda: bool(worker.link.heartbeats))
        assert worker.report.confinement == worker.place.installing.confinement.described
        assert worker.report.confinement.startswith(("landlock", "none: "))
