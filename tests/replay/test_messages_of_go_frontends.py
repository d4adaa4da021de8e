"""Every request that a Go frontend was recorded to send, sent to workers of ours: the reply has LocalAI's keys and
means what it should, also where LocalAI's own worker went wrong.
"""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import pytest
from msgspec import Struct
from tests.replay.lab import ENTRIES, Lab
from tests.replay.recordings import Exchange, Payload, calls, exchanges, needs_recordings
from tests.replay.workers import FIRST, RECORDED, SECOND, GoFrontend
from tests.worker.shelf import said_by
from tests.worker.whole_worker import command
from tests.worker.world import KEY, tiny_chat

from enginehouse.core import subjects, wire

VERBS = (subjects.INSTALL, subjects.UPGRADE, subjects.DELETE, subjects.LIST)
_INSTALL: dict[str, type] = {"success": bool, "address": str, "error": str}
_UPGRADE: dict[str, type] = {
    "success": bool,
    "error": str,
    "stopped_process_keys": list,
    "reports_stopped_processes": bool,
}
KEYS: dict[str, dict[str, type]] = {
    subjects.INSTALL: _INSTALL,
    subjects.UPGRADE: _UPGRADE,
    subjects.DELETE: _UPGRADE,
    subjects.LIST: {"backends": list, "error": str},
}
_ROW: dict[str, type] = {
    **{"name": str, "is_system": bool, "is_meta": bool, "installed_at": str, "gallery_url": str},
    **{"version": str, "uri": str, "digest": str},
}


class Scene(Struct, frozen=True):
    """What was there when a recording began, and which directories are there at its end."""

    recording: str
    before: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    second: tuple[str, ...] = ()
    is_tag_moved: bool = False


MOCK = ("cpu-mock", "mock")
SCENES = (
    Scene("04-install-both-nodes", (), MOCK, MOCK),
    Scene("05-install-already-installed", ("mock",), MOCK, MOCK),
    Scene("06-install-fails", ("mock",), MOCK, MOCK),
    Scene("07-reconciler-retries", ("mock",), MOCK, MOCK),
    Scene("08-listings", ("mock",), MOCK, MOCK),
    Scene("09-node-scoped-install-delete", ("mock",), MOCK, MOCK),
    Scene("10-external-install", ("mock",), MOCK, MOCK),
    Scene("11-upgrade", ("mock",), MOCK, MOCK, is_tag_moved=True),
    Scene("12-upgrade-old-worker", ("mock",), MOCK, MOCK, is_tag_moved=True),
    Scene("26-two-frontends", ("mock",), (*MOCK, "cpu-other", "other"), (*MOCK, "cpu-other", "other")),
    Scene("28-backend-delete", ("mock", "other")),
    Scene("30-install-timeout", (), ("cpu-other", "other"), ("cpu-other", "other")),
    Scene("31-cancel", (), ("cpu-other", "other"), ()),
    Scene("36-concrete-guard", (), ("cpu-mock",), ("cpu-mock",)),
)


def expected(exchange: Exchange) -> bool:
    """Whether it is to succeed: as it did for LocalAI, but where that was wrong or cannot be."""
    request = exchange.request
    if request.get("uri") and request.get("name"):
        return True  # S57: the files arrived, and LocalAI said that they had not
    if exchange.is_unheard:
        return True  # our workers know upgrades
    assert exchange.reply is not None
    return bool(exchange.reply.get("success", not exchange.reply.get("error")))


def check(exchange: Exchange, reply: Payload) -> None:
    """LocalAI's rules for replies."""
    kinds = KEYS[exchange.verb]
    assert set(reply) <= {*kinds, "outcome"}, reply
    for key, value in reply.items():
        if key in kinds and not (key == "backends" and value is None):
            assert isinstance(value, kinds[key]), (key, reply)
        # Go leaves out what is empty, but for what says yes or no.
        assert value not in ("", []) or key == "backends", (key, reply)
    assert ("error" in reply) is not expected(exchange), reply
    if exchange.verb != subjects.LIST:
        assert reply["success"] is expected(exchange), reply
    if exchange.verb in (subjects.UPGRADE, subjects.DELETE):
        assert reply["reports_stopped_processes"] is True
    for row in reply.get("backends") or ():
        assert all(isinstance(row[key], kind) for key, kind in _ROW.items() if key in row), row
        assert {"name", "is_system", "is_meta"} <= set(row)


@needs_recordings
def test_the_gallery_of_the_lab_is_the_one_that_was_recorded() -> None:
    (call,) = calls("08-listings", "/backends/available")
    ours = {str(entry["name"]): entry for entry in ENTRIES}
    for row in call["response"]:
        told = {key: value for key, value in row.items() if key not in ("gallery", "installed")}
        assert ours[row["name"]] == told


@needs_recordings
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.recording)
async def test_every_recorded_request_gets_a_reply_that_a_go_frontend_reads_and_that_is_right(
    go: GoFrontend, lab: Lab, scene: Scene
) -> None:
    for worker in (FIRST, SECOND):
        for name in scene.before:
            await go.install(worker, name)
    if scene.is_tag_moved:
        await lab.move_tag(lab.new)
    replayed = exchanges(scene.recording, *VERBS)
    assert replayed
    for exchange in replayed:
        check(exchange, await go.replay(exchange))
        for worker in (FIRST, SECOND):
            assert not any("@" in name for name in go.directories(worker)), "S56"
    assert (go.directories(FIRST), go.directories(SECOND)) == (set(scene.first), set(scene.second))
    assert go.residue(FIRST) + go.residue(SECOND) == []
    if scene.is_tag_moved:
        assert said_by(go.backends(FIRST) / "cpu-mock") == "new"


@needs_recordings
async def test_progress_has_the_recorded_subject_and_keys_when_an_operation_is_named(go: GoFrontend) -> None:
    exchange = exchanges("04-install-both-nodes", subjects.INSTALL)[0]
    _, recorded = exchange.progress[0]
    assert (await go.replay(exchange))["success"]
    node_id = go.node_ids[RECORDED[exchange.node_id]]
    assert go.events
    for subject, event in go.events:
        assert subject == f"nodes.{node_id}.backend.install.{exchange.request['op_id']}.progress"
        assert {"op_id", "node_id", "backend", "percentage"} <= set(event)
        assert set(event) <= {*recorded, "intent", "progress"}
        assert (event["op_id"], event["node_id"]) == (exchange.request["op_id"], node_id)
        assert event["backend"] == "lab@mock", "the words of the request, as LocalAI does"
        assert all(type(event[key]) is type(recorded[key]) for key in recorded if key in event and key != "percentage")
    percentages = [float(event["percentage"]) for _, event in go.events]
    assert percentages == sorted(percentages)
    assert percentages[0] == 0.0
    assert percentages[-1] >= 99.0
    assert [event.get("file_name", "") for _, event in go.events][-1]


@needs_recordings
async def test_the_same_request_without_an_operation_is_done_in_silence(go: GoFrontend) -> None:
    exchange = exchanges("04-install-both-nodes", subjects.INSTALL)[0]
    request = {key: value for key, value in go.own(exchange.request).items() if key != "op_id"}
    assert (await go.ask(FIRST, subjects.INSTALL, request))["success"]
    assert go.directories(FIRST) == {"cpu-mock", "mock"}
    assert go.events == []


@needs_recordings
async def test_a_name_of_a_gallery_becomes_the_plain_pointer_and_is_listed_so(go: GoFrontend, lab: Lab) -> None:
    """S56."""
    exchange = exchanges("04-install-both-nodes", subjects.INSTALL)[0]
    assert exchange.request["backend"] == "lab@mock"
    await go.replay(exchange)
    listed = await go.listed(FIRST)
    assert set(listed) == {"mock", "cpu-mock"}
    assert (listed["mock"]["is_meta"], listed["cpu-mock"]["is_meta"]) == (True, False)
    assert (listed["cpu-mock"]["digest"], listed["cpu-mock"]["uri"]) == (lab.old.digest, lab.reference())
    assert listed["cpu-mock"]["gallery_url"] == lab.gallery_url


@needs_recordings
async def test_installing_what_is_there_changes_nothing_and_force_does_it_again(go: GoFrontend) -> None:
    await go.install(FIRST, "lab@mock")
    tree = go.backends(FIRST) / "cpu-mock"
    before = tree.stat().st_ino
    for exchange in exchanges("05-install-already-installed", subjects.INSTALL):
        if RECORDED[exchange.node_id] == FIRST:
            assert (await go.replay(exchange))["success"]
            assert tree.stat().st_ino == before
            assert [event["percentage"] for _, event in go.events if event["percentage"]] == [], "nothing was fetched"
    forced = next(one for one in exchanges("12-upgrade-old-worker", subjects.INSTALL) if one.request.get("force"))
    await go.ask(FIRST, subjects.INSTALL, go.own(forced.request))
    assert tree.stat().st_ino != before


@needs_recordings
@pytest.mark.parametrize(
    ("recording", "number", "said"),
    [
        ("06-install-fails", 0, "cannot find a backend named 'nope'"),
        ("06-install-fails", 2, "lab/missing"),
        ("07-reconciler-retries", -2, "the request names neither a backend nor a uri"),
        ("10-external-install", 1, "set `name` to the name of the backend"),
        ("28-backend-delete", -1, "cannot find a backend named 'never-there'"),
    ],
)
async def test_what_cannot_be_done_is_said_in_plain_words_and_leaves_nothing(
    go: GoFrontend, recording: str, number: int, said: str
) -> None:
    exchange = _without_listings(recording)[number]
    reply = await go.replay(exchange)
    assert reply["success"] is False
    assert reply["error"].startswith("cannot ")
    assert said in reply["error"]
    for worker in (FIRST, SECOND):
        assert go.directories(worker) == set()
        assert go.residue(worker) == []


def _without_listings(recording: str) -> list[Exchange]:
    found = exchanges(recording, subjects.INSTALL, subjects.UPGRADE, subjects.DELETE)
    if recording.startswith("07"):
        # The empty name is asked for three times; the last request of that recording is another one.
        return [one for one in found if not one.request["backend"]]
    return found


@needs_recordings
async def test_an_external_install_whose_name_stands_beside_succeeds_and_keeps_its_alias(
    go: GoFrontend, lab: Lab
) -> None:
    """S57."""
    external, nameless = exchanges("10-external-install", subjects.INSTALL)[:2]
    assert external.request["backend"] == ""
    assert (await go.replay(external))["success"]
    assert go.directories(FIRST) == {"ext-mock"}
    assert said_by(go.backends(FIRST) / "ext-mock") == "new"
    assert (await go.listed(FIRST))["ext-mock"]["digest"] == lab.new.digest
    assert (await go.replay(nameless))["success"] is False
    assert (await go.ask(FIRST, subjects.DELETE, {"backend": "extm"}))["success"], "by its alias"
    assert go.directories(FIRST) == set()


@needs_recordings
async def test_a_deleted_backend_takes_its_pointer_along_and_a_second_delete_is_an_error(go: GoFrontend) -> None:
    await go.install(FIRST, "lab@other")
    first, again = exchanges("09-node-scoped-install-delete", subjects.DELETE)
    assert (await go.replay(first))["success"]
    assert go.directories(FIRST) == set()
    reply = await go.replay(again)
    assert (reply["success"], reply["reports_stopped_processes"]) == (False, True)
    assert "cannot find a backend named 'other'" in reply["error"]


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2):
            return True
    except OSError:
        return False


@needs_recordings
@pytest.mark.parametrize(
    ("recording", "verb"), [("11-upgrade", subjects.UPGRADE), ("28-backend-delete", subjects.DELETE)]
)
async def test_the_processes_that_an_upgrade_or_a_delete_ends_are_named_in_the_reply(
    go: GoFrontend, lab: Lab, recording: str, verb: str
) -> None:
    await go.install(FIRST, "mock")
    model = msgspec.structs.replace(tiny_chat(), backend="cpu-mock")
    place = wire.ModelPullRequest(model=model, op_id="place", command=command(f"place-{verb}"))
    assert (await go.ask(FIRST, subjects.PULL_MODEL, place))["success"]
    begin = wire.BackendInstallRequest(
        backend="cpu-mock",
        model_id=model.name,
        command=command(f"begin-{verb}"),
        model=wire.ModelStart(model=model, key=KEY),
    )
    started = await go.ask(FIRST, subjects.INSTALL, begin)
    assert listens(started["address"]), started
    await lab.move_tag(lab.new)
    asked = [one for one in exchanges(recording, verb) if one.request["backend"] == "cpu-mock"]
    reply = await go.replay(next(one for one in asked if RECORDED[one.node_id] == FIRST))
    assert reply["stopped_process_keys"] == [f"{model.name}#0"]
    assert (reply["success"], reply["reports_stopped_processes"]) == (True, True)
    assert not listens(started["address"])
    assert (await go.ask(FIRST, subjects.RUNNING, {}))["models"] == []


@needs_recordings
async def test_retries_of_what_cannot_heal_leave_the_worker_as_it_was(go: GoFrontend) -> None:
    await go.install(FIRST, "mock")
    before: Any = await go.listed(FIRST)
    for exchange in exchanges("07-reconciler-retries", subjects.INSTALL):
        if RECORDED[exchange.node_id] == FIRST:
            assert not (await go.replay(exchange))["success"]
            assert go.events == [], "these carry no operation"
    assert await go.listed(FIRST) == before
