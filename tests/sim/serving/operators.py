"""Operators: they load, unload, schedule, drain, label, edit and delete, and remember what they were told.

Each request is asked once. One whose answer got lost may have been done or not; what was confirmed must be so in the
end, unless something later speaks against it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from tests.sim.serving.options import CHOSEN, LABEL, Wanted, Wish

from enginehouse.build_frontend import Frontend
from enginehouse.core.errors import EnginehouseError
from enginehouse.core.ids import OperationId
from enginehouse.core.model_answers import ReplaceModel
from enginehouse.core.schedule import ScheduleRequest
from enginehouse.frontend.acceptance import Requester

if TYPE_CHECKING:
    from tests.sim.serving.world import ServingWorld

ANSWER_SECONDS = 15.0
Do = Callable[[Frontend], Awaitable[str]]


class Operators:
    def __init__(self, world: ServingWorld) -> None:
        self._world = world
        self._told: dict[int, str] = {}  # wish -> operation
        self.asked: list[Wish] = []  # in the order of asking
        self.confirmed: dict[int, tuple[float, float]] = {}  # wish -> when it was asked, and confirmed

    async def ask(self, wish: Wish) -> None:
        await asyncio.sleep(wish.at)
        world, began = self._world, self._world.loop.time()
        frontend = world.frontends[wish.frontend % len(world.frontends)]
        do = self._doing(wish)
        if do is None:
            return
        who = f"operator-{wish.number}"
        self.asked.append(wish)
        world.trace.note(who, f"asks {frontend.name} to {wish.kind} {wish.model} {wish.node}")
        if wish.kind == "delete_model":
            world.maybe_deleted.add(wish.model)
        try:
            operation_id = await frontend.call(do, ANSWER_SECONDS)
        except EnginehouseError as error:
            world.trace.note(who, f"hears {error.code}")
            return
        world.trace.note(who, f"is told {operation_id[:8]}")
        self.confirmed[wish.number] = (began, world.loop.time())
        self._told[wish.number] = operation_id
        if wish.kind == "delete_model":
            world.deleted_at[wish.model] = world.loop.time()

    def _doing(self, wish: Wish) -> Do | None:
        machines = self._world.machines
        node = machines[wish.node % len(machines)].name if wish.node >= 0 else None
        requester = Requester(author=f"operator-{wish.number}")
        match wish.kind:
            case "load":
                return lambda to: _load(to, wish, node, requester.author)
            case "unload":
                return lambda to: to.operations.request_unload(wish.model, node, requester)
            case "schedule":
                return lambda to: _schedule(to, wish.model, wish.wanted)
            case "unschedule":
                return lambda to: _nothing(to.schedules.remove(wish.model))
            case "delete_model":
                return lambda to: to.operations.request_model_delete(wish.model, requester)
            case "edit":
                config = {"context_size": 1024 * (wish.number + 1)}
                asked = ReplaceModel(config=config)
                return lambda to: _nothing(to.model_rows.definitions.change(wish.model, asked, is_patch=True))
            case "cancel":
                about = self._told.get(wish.about, "")
                if not about:
                    return None
                operation_id = OperationId(about)
                return lambda to: _nothing(to.cancellation.cancel(operation_id, None, requester.author))
            case _:
                return _about_node(wish, node or machines[0].name, requester)


def _about_node(wish: Wish, node: str, requester: Requester) -> Do:
    match wish.kind:
        case "drain":
            return lambda to: to.operations.request_drain(node, requester)
        case "resume":
            return lambda to: _nothing(to.nodes.resume(node))
        case "label":
            return lambda to: _nothing(to.labels.merge(node, CHOSEN))
        case _:
            return lambda to: _nothing(to.labels.remove(node, LABEL))


async def _load(to: Frontend, wish: Wish, node: str | None, author: str) -> str:
    found = await to.loader.request(wish.model, node, author)
    return found if isinstance(found, str) else ""


async def _schedule(to: Frontend, model: str, wanted: Wanted) -> str:
    request = ScheduleRequest(
        model_name=model,
        node_selector=dict(CHOSEN) if wanted.is_labelled else {},
        min_replicas=wanted.least,
        max_replicas=wanted.most,
        spread_all=wanted.spread,
        idle_seconds=wanted.idle_seconds,
    )
    await to.schedules.put(request)
    return ""


async def _nothing(done: Awaitable[object]) -> str:
    await done
    return ""
