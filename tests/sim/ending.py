"""The end of a run: whether everything has settled, and whether the world is then as the requests say.

Looks at disks, rows and what watchers were told; asks every frontend for every operation that somebody was promised.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
from tests.sim.clients import ANSWER_SECONDS, Clients
from tests.sim.disk import Disk
from tests.sim.options import BACKENDS, METAS
from tests.sim.rows import IntentRow, select_rows
from tests.sim.store import EPOCH
from tests.sim.trace import Violation

from enginehouse.core.errors import EnginehouseError
from enginehouse.core.ids import NodeId

if TYPE_CHECKING:
    from tests.sim.world import World

SHOWN_WITHIN_SECONDS = 2.0


def is_settled(world: World) -> bool:
    return (
        world.loop.time() > world.network.quiet_at
        and all(intent.is_ended for intent in world.checks.intents.values())
        and all(frontend.objects is not None for frontend in world.frontends)
        and not any(machine.running() for machine in world.machines)
        and not world.checks.steered
    )


def shown_open(world: World) -> str:
    rows = [repr(intent) for intent in world.checks.intents.values() if not intent.is_ended]
    working = [f"{machine.name}: {machine.running()}" for machine in world.machines]
    nodes = select_rows(
        world.database.connection, "select name, health, heard_at from nodes join node_liveness on node_id = id"
    )
    return "\n".join([*rows, *working, repr(nodes)])


async def judge_the_end(world: World, clients: Clients) -> None:
    for wrong in (
        *_wrong_disks(world),
        *_left_behind(world),
        *_wrong_refusals(world, clients),
        *_done_twice(world, clients),
        *_names_that_lead_nowhere(world, clients),
        *_shown_late(world),
        *await _unreadable(world, clients),
    ):
        world.loop.fail(Violation(*wrong))


def _wrong_disks(world: World) -> list[tuple[str, str]]:
    """G2: the final state is that of the newest intent that was not cancelled. A cancelled one that was past its
    return when the word came has been done all the same, and then counts. LocalAI's workers do what comes last.
    """
    machines = {machine.node_id: machine for machine in world.machines}
    newest: dict[tuple[str, str], IntentRow] = {}
    for intent in sorted(world.checks.intents.values(), key=lambda one: one.generation):
        effects = machines[intent.node_id].checks.effects if intent.node_id in machines else {}
        done = any(one.generation == intent.generation for one in effects.get(intent.subject, ()))
        if intent.state != "cancelled" or done:
            newest[(intent.node_id, intent.subject)] = intent
    wrong: list[tuple[str, str]] = []
    for (node_id, subject), intent in newest.items():
        if intent.state != "succeeded" or node_id not in machines or machines[NodeId(node_id)].is_old:
            continue
        machine = machines[NodeId(node_id)]
        if _is_started_later(world, intent):
            continue
        wanted, found = _wanted_and_found(intent, machine.disk)
        if wanted != found:
            wrong.append(
                (
                    "G2",
                    f"{machine.name} has {found or 'nothing'} as {subject}, but intent {intent.id} of generation "
                    f"{intent.generation} succeeded with {wanted or 'nothing'}",
                )
            )
    return wrong


def _is_started_later(world: World, intent: IntentRow) -> bool:
    """Whether a model was requested to run after its removal had been: a start brings the files that it needs."""
    about = f"replica:{intent.subject.partition(':')[2]}#"
    return intent.subject.startswith("model:") and any(
        one.node_id == intent.node_id and one.subject.startswith(about) and one.created_at > intent.created_at
        for one in world.checks.intents.values()
    )


def _wanted_and_found(intent: IntentRow, disk: Disk) -> tuple[str, str]:
    """What the intent left, as it said, and what is there now. An engine that was started may have ended since."""
    action = msgspec.json.decode(intent.action)
    about = intent.subject.partition(":")[2]
    match action["type"]:
        case "install_backend" | "remove_backend":
            tree = disk.trees.get(about)
            wanted = action["resolved"]["digest"] if action["type"] == "install_backend" else ""
            if action.get("keep"):
                wanted = msgspec.json.decode(intent.outcome or "{}").get("digest", "")
            return wanted, tree.digest if tree else ""
        case "pull_model" | "remove_model":
            return "held" if action["type"] == "pull_model" else "", "held" if about in disk.models else ""
        case "stop_replica":
            return "", disk.engines[about].nonce if about in disk.engines else ""
    return "", ""


def stale_routes(world: World) -> list[str]:
    """G13: rows of replicas whose process is not there."""
    nonces = {engine.nonce for machine in world.machines for engine in machine.disk.engines.values()}
    rows = select_rows(world.database.connection, "select nonce from replicas")
    return [str(nonce) for (nonce,) in rows if nonce not in nonces]


def _left_behind(world: World) -> list[tuple[str, str]]:
    """No lease without work, no lock without a holder."""
    leased = [intent for intent in world.checks.intents.values() if intent.owner or intent.lease_until]
    held = [(machine, machine.held_locks()) for machine in world.machines]
    return [
        *(("G3", f"intent {intent.id} has ended and is still leased to {intent.owner}") for intent in leased),
        *(("G3", f"{machine.name} still holds {locks}") for machine, locks in held if locks),
    ]


def _wrong_refusals(world: World, clients: Clients) -> list[tuple[str, str]]:
    """G1: not accepted means no effect at all."""
    left = {row.author: row.id for row in world.checks.operations.values()}
    return [
        ("G1", f"{author} was refused, yet operation {left[author]} is there")
        for author in clients.refused
        if author in left
    ]


def _done_twice(world: World, clients: Clients) -> list[tuple[str, str]]:
    """G4: under one key there is one operation, however often it was asked for."""
    left = Counter(row.author for row in world.checks.operations.values())
    return [
        ("G4", f"{author} asked under one key and got {left[author]} operations")
        for author in clients.keyed
        if left[author] > 1
    ]


def _names_that_lead_nowhere(world: World, clients: Clients) -> list[tuple[str, str]]:
    """G10: every name that was asked for gets its pointer, also where the request joined the install of another."""
    wrong: list[tuple[str, str]] = []
    machines = {machine.node_id: machine for machine in world.machines}
    for accepted in clients.accepted:
        meta = accepted.name.rpartition("@")[2]
        if accepted.kind != "install" or meta not in METAS:
            continue
        # A share that was cancelled promises nothing any more, though the intent goes on for another request.
        query = "select intent_id from operation_intents where operation_id = ? and not detached"
        rows = select_rows(world.database.connection, query, (accepted.operation_id,))
        intents = [world.checks.intents[str(intent_id)] for (intent_id,) in rows]
        for intent in intents:
            machine = machines.get(intent.node_id)
            here = [one for one in intents if one.node_id == intent.node_id]
            if machine is None or any(one.state != "succeeded" for one in here):
                continue
            since = min(one.created_at for one in here) - EPOCH
            if BACKENDS[0] not in machine.checks.seen_since(f"pointer:{meta}", since):
                said = f"{accepted.author} was told that {meta} is installed on {machine.name}, where it led nowhere"
                wrong.append(("G10", said))
    return wrong


def _ends(world: World) -> dict[str, float]:
    """When each operation ended: with the last of its intents, a load when nobody steers it any more. One that began
    after all had settled may be open.
    """
    served = select_rows(
        world.database.connection, "select operation_id, intent_id from operation_intents where not detached"
    )
    ended = {operation_id: at - EPOCH for operation_id, at in world.checks.steered_until.items()}
    is_open: set[str] = set()
    for operation_id, intent_id in served:
        at = world.checks.ended_at.get(str(intent_id))
        if at is None:
            is_open.add(str(operation_id))
        else:
            ended[str(operation_id)] = max(at - EPOCH, ended.get(str(operation_id), 0.0))
    return {operation_id: at for operation_id, at in ended.items() if operation_id not in is_open}


def is_all_shown(world: World) -> bool:
    ended = {operation_id for operation_id, at in _ends(world).items() if at > world.calm_at}
    return all(ended <= watcher.end_seen_at.keys() for watcher in world.living_watchers())


def _shown_late(world: World) -> list[tuple[str, str]]:
    """G9: all frontends show the same end within two seconds of the commit, whatever became of the messages."""
    wrong: list[tuple[str, str]] = []
    for watcher in world.living_watchers():
        for operation_id, at in _ends(world).items():
            shown = watcher.end_seen_at.get(operation_id)
            if at > world.calm_at and (shown is None or shown > at + SHOWN_WITHIN_SECONDS):
                wrong.append(("G9", f"{watcher.name} showed the end of {operation_id} at {shown}, which ended at {at}"))
    return wrong


async def _unreadable(world: World, clients: Clients) -> list[tuple[str, str]]:
    """G1: an operation can be read by id on every frontend, as it was asked for."""
    wrong: list[tuple[str, str]] = []
    for accepted in clients.accepted:
        for frontend in world.frontends:
            try:
                view = await frontend.call(
                    lambda to, wanted=accepted.operation_id: to.board.view(wanted),  # type: ignore[misc]
                    ANSWER_SECONDS,
                )
            except EnginehouseError as error:
                wrong.append(("G1", f"{frontend.name} cannot read operation {accepted.operation_id}: {error}"))
                continue
            if (view.kind, view.fullName, view.author) != (accepted.kind, accepted.name, accepted.author):
                wrong.append(("G1", f"{frontend.name} shows operation {accepted.operation_id} as {view}"))
    return wrong
