"""The calm at the end: whether what is wanted is there, and whether it stays so.

What is wanted is read from the rows, what is there from the machines; the product's own judgement is not asked. What
cannot be met must have a reason, and there must really be no room.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING

from tests.sim.rows import select_rows
from tests.sim.serving.facts import ModelFact, NodeFact, model_names, read_model, read_replicas
from tests.sim.serving.operators import Operators
from tests.sim.store import EPOCH

from enginehouse.core.reconcile import RECONCILER

if TYPE_CHECKING:
    from tests.sim.serving.machines import ServingMachine
    from tests.sim.serving.world import ServingWorld

LOOK_SECONDS = 1.0
QUIET_SECONDS = 6.0  # two passes of the reconciler on any frontend
SETTLE_SECONDS = 150.0  # several of the longest pauses, and a replica too many for each
AGAINST_LOADS = frozenset({"unload", "delete_model", "cancel"})


async def settle(world: ServingWorld) -> None:
    """Until everything is as it is wanted and nothing has moved for a while."""
    limit = world.loop.time() + SETTLE_SECONDS
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        wrong = _unsettled(world) or unmet(world)
        is_quiet = world.loop.time() - world.ledger.last_change > QUIET_SECONDS
        if not wrong and is_quiet and world.is_unused():  # requests are a reason to grow while they are counted
            return
        if world.loop.time() > limit:
            guarantee, what = wrong[0] if wrong else ("flapping", "something still changes")
            world.judge(guarantee, f"not settled after {SETTLE_SECONDS:g} s: {what}")


async def stay(world: ServingWorld) -> None:
    """Nothing changes any more: no start at all, no stop but of what nobody uses."""
    known = set(world.checks.operations)
    running = {nonce for nonce in world.engines if world.is_alive(nonce)}
    limit = world.loop.time() + world.serving.calm_seconds
    while world.loop.time() < limit:
        await asyncio.sleep(LOOK_SECONDS)
        alive = {nonce for nonce in world.engines if world.is_alive(nonce)}
        world.judge("flapping", f"{sorted(alive - running)} started in the calm" if alive - running else "")
        running = alive
    futile = Counter[str]()
    tried: set[tuple[str, float]] = set()
    for operation in world.checks.operations.values():
        if operation.id in known:
            continue
        if operation.kind == "load" and operation.author == RECONCILER:
            # Several at once are one try.
            futile[operation.name] += (operation.name, operation.created_at) not in tried
            tried.add((operation.name, operation.created_at))
        elif (operation.kind, operation.author) != ("unload", RECONCILER):
            world.judge("flapping", f"{operation} began in the calm")
    for model, times in futile.items():
        most = 2 + world.serving.calm_seconds / world.pace.max_retry_seconds * 4
        missing = is_missing(read_model(world.database.connection, model))
        world.judge("flapping", "" if missing else f"{times} loads of {model} began in the calm, and none is missing")
        world.judge("flapping", f"{model} was tried {times} times in the calm" if times > most else "")
    for guarantee, what in unmet(world):
        world.judge(guarantee, f"after the calm: {what}")


def judge_operators(world: ServingWorld, operators: Operators) -> None:
    """What an operator was told to be loaded is kept, where nothing that was asked for later speaks against it."""
    for wish in operators.asked:
        if wish.kind != "load" or wish.number not in operators.confirmed:
            continue
        asked_at, _ = operators.confirmed[wish.number]
        against = [
            one
            for one in operators.asked
            if one.kind in AGAINST_LOADS
            and (one.kind == "cancel" or one.model == wish.model)
            and operators.confirmed.get(one.number, (0.0, world.loop.time()))[1] >= asked_at
        ]
        fact = read_model(world.database.connection, wish.model)
        if not against and not fact.kept:
            world.judge("wanted", f"operator-{wish.number} loaded {wish.model}, and it is not kept")


def _unsettled(world: ServingWorld) -> list[tuple[str, str]]:
    """What is still under way, and who is not back."""
    lost = {one.node_id for one in world.machines if one.is_lost}
    steered = [world.checks.operations[one] for one in sorted(world.checks.steered)]
    # What runs on a machine that never comes back is not known, so its drain waits for it.
    steered = [one for one in steered if one.kind != "drain" or not lost.issuperset(json.loads(one.targets))]
    if steered:
        return [("end", f"loads or drains are under way: {steered}")]
    open_ones = [one for one in world.checks.intents.values() if not one.is_ended and one.node_id not in lost]
    if open_ones:
        return [("end", f"intents are open: {[(one.subject, one.state, one.reason) for one in open_ones]}")]
    down = [one.name for one in world.frontends if one.objects is None]
    alive = [one.name for one in world.machines if one.process is not None]
    rows = select_rows(world.database.connection, "select name from nodes where health = 'healthy'")
    down += [name for name in alive if (name,) not in rows]
    rows = select_rows(world.database.connection, "select name from nodes where health = 'offline'")
    down += [one.name for one in world.machines if one.is_lost and one.node_id and (one.name,) not in rows]
    return [("end", f"{down} are not back")] if down else []


def unmet(world: ServingWorld) -> list[tuple[str, str]]:
    wrong = [*_untrue_rows(world), *_left_on_drained(world), *_forgotten_reservations(world)]
    for name in model_names(world.database.connection):
        fact = read_model(world.database.connection, name)
        wrong += _surplus(fact)
        room = [one for node in _lacking(fact) if (one := _room(world, fact, node))]
        if room:
            wrong.append(("wanted", f"{_shown(fact)}: one is missing, and there is room: {room}"))
        elif is_missing(fact) and not fact.reason:
            wrong.append(("wanted", f"{_shown(fact)}: one is missing, and no reason is told"))
    return wrong


def _untrue_rows(world: ServingWorld) -> list[tuple[str, str]]:
    """Rows of replicas are processes, and processes are rows."""
    lost = {one.node_id for one in world.machines if one.is_lost}
    rows = {one.nonce for one in read_replicas(world.database.connection) if one.node_id not in lost}
    alive = {nonce for nonce in world.engines if world.is_alive(nonce)}
    return [
        *(("G13", f"a row of {nonce}, which has no process") for nonce in sorted(rows - alive)),
        *(("orphan", f"{nonce} runs, and nobody knows it") for nonce in sorted(alive - rows)),
    ]


def _left_on_drained(world: ServingWorld) -> list[tuple[str, str]]:
    """A drained node is empty."""
    rows = select_rows(world.database.connection, "select name from nodes where drained")
    engines = {one.name: sorted(one.disk.engines) for one in world.machines if (one.name,) in rows}
    return [("drained", f"{name} is drained, and runs {keys}") for name, keys in engines.items() if keys]


def _forgotten_reservations(world: ServingWorld) -> list[tuple[str, str]]:
    """G15: memory that nobody will take is not kept."""
    query = "select operation_id, model from reservations where settled_at = 0 and until > ?"
    rows = select_rows(world.database.connection, query, (EPOCH + world.loop.time(),))
    left = [model for operation_id, model in rows if operation_id not in world.checks.steered]
    return [("G15", f"memory is reserved for {left}, and no load is under way")] if left else []


def _surplus(fact: ModelFact) -> list[tuple[str, str]]:
    schedule, here = fact.schedule, fact.serving
    belongs = {node.id for node in fact.nodes if fact.is_selected(node)}
    astray = [one.nonce for one in here if (schedule.spread or schedule.selector) and one.node_id not in belongs]
    wrong = [("wanted", f"{_shown(fact)}: {astray} do not belong where they are")] if astray else []
    if schedule.most and len(here) > schedule.most:
        wrong.append(("wanted", f"{_shown(fact)}: at most {schedule.most}"))
    twice = [node for node, number in Counter(one.node_id for one in here).items() if number > 1]
    if schedule.spread and twice:
        wrong.append(("wanted", f"{_shown(fact)}: more than one on a node"))
    return wrong


def is_missing(fact: ModelFact) -> bool:
    """Whether there are fewer than are wanted, wherever they could go."""
    least = max(fact.schedule.least, 1 if "" in fact.kept else 0)
    return bool(_lacking(fact)) or (not fact.schedule.spread and len(fact.serving) < least)


def _lacking(fact: ModelFact) -> list[NodeFact]:
    """The nodes of which one should get a replica; none where enough are there."""
    here = {one.node_id for one in fact.serving}
    if fact.schedule.spread:
        return [node for node in fact.matching if node.id not in here]
    number, most = len(fact.serving), fact.schedule.most
    if most and number >= most:
        return []
    named = [node for node in fact.matching if node.id in fact.kept and node.id not in here]
    if named:
        return named
    least = max(fact.schedule.least, 1 if "" in fact.kept else 0)
    return fact.matching if number < least else []


def _room(world: ServingWorld, fact: ModelFact, node: NodeFact) -> str:
    """Why a replica fits on a node; "" where it does not. What nobody wants and uses has to make room."""
    machine = next(one for one in world.serving_machines if one.name == node.name)
    taken = {one.slot for one in fact.replicas if one.node_id == node.id}
    if len(taken) >= machine.slots:
        return ""
    free = machine.memory_bytes - machine.used_bytes
    need = _demand(world, fact.name)
    if need <= free:
        return f"{machine.name} has {free >> 20} MiB for {need >> 20}"
    given = _evictable(world, machine, fact.name)
    return f"{machine.name} has {free >> 20} MiB, and {given >> 20} of idle ones" if need <= free + given else ""


def _evictable(world: ServingWorld, machine: ServingMachine, model: str) -> int:
    given = 0
    for name in model_names(world.database.connection):
        fact = read_model(world.database.connection, name)
        if name == model or fact.schedule.spread:
            continue
        here = [one for one in fact.serving if one.node_id == machine.node_id and world.is_alive(one.nonce)]
        spare = max(0, len(fact.serving) - fact.least)
        given += sum(sorted(world.engines[one.nonce][1].memory_bytes for one in here)[:spare])
    return given


def _demand(world: ServingWorld, model: str) -> int:
    return next(one.memory_bytes for one in world.serving.models if one.name == model)


def _shown(fact: ModelFact) -> str:
    names = {node.id: node.name for node in fact.nodes}
    here = [f"{names.get(one.node_id)}#{one.slot}" for one in fact.serving]
    kept = [names.get(one, "anywhere") for one in fact.kept]
    return f"{fact.name} has {here}, wanted {fact.schedule}, kept {kept}, on {[one.name for one in fact.matching]}"
