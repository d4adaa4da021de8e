"""People and programs that request for things, and remember what they were told.

Every request has an author of its own, so that what it left behind can be told from what another left. A client with a
key asks again until it is answered, at any frontend, and sometimes once more after that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from msgspec import Struct
from tests.sim.options import SimRequest
from tests.sim.rows import select_rows
from tests.sim.trace import Violation

from enginehouse.build_frontend import Frontend
from enginehouse.core.errors import EnginehouseError
from enginehouse.core.ids import OperationId
from enginehouse.core.operation import BackendRequest
from enginehouse.frontend.acceptance import Requester

if TYPE_CHECKING:
    from tests.sim.world import World

ANSWER_SECONDS = 15.0
TRIES = 4
PAUSE_SECONDS = 1.5
RESUME_TRIES = 60
RESUME_PAUSE_SECONDS = 0.2
REPEAT_RATE = 0.3  # of clients with a key who ask once more although they were answered
LOST = frozenset({"connection_lost", "connection_refused"})

Ask = Callable[[Frontend], Awaitable[str]]


class Accepted(Struct, frozen=True):
    """What a caller was told, and how it must be found ever after."""

    operation_id: OperationId
    kind: str
    name: str
    author: str


class Clients:
    def __init__(self, world: World) -> None:
        self._world = world
        self.accepted: list[Accepted] = []
        self.refused: list[str] = []  # authors who were told no
        self.keyed: list[str] = []  # authors who asked under a key
        self._by_request: dict[int, Accepted] = {}
        self._told: set[str] = set()
        self._unheard: set[str] = set()  # authors who were left without an answer

    async def ask(self, request: SimRequest) -> None:
        await asyncio.sleep(request.at)
        number = request.number
        author = f"client-{number}"
        key = f"key-{number}" if request.is_keyed else ""
        match request.kind:
            case "cancel":
                await self._cancel(author, request)
            case "remove_node":
                await self._remove_node(author, request)
            case "retry":
                before = self._by_request.get(request.about)
                if before is not None:
                    again = Requester(author=author, key=key)
                    found = await self._request(
                        request,
                        author,
                        lambda to: to.cancellation.retry(before.operation_id, None, again),
                        f"retry {before.operation_id[:8]}",
                    )
                    self._keep(number, OperationId(found), before.kind, before.name, author)
            case "drain" | "resume" | "load" | "unload" | "delete_model":
                await self._ask_about_models(author, key, request)
            case "install" | "upgrade" | "delete":
                asked = self._backend_request(request)
                found = await self._request(
                    request,
                    author,
                    lambda to: to.operations.request(asked, Requester(author=author, key=key)),
                    f"{asked.kind} {asked.name} on {asked.nodes or 'all'}",
                )
                self._keep(number, OperationId(found), asked.kind, asked.name, author)

    async def _ask_about_models(self, author: str, key: str, request: SimRequest) -> None:
        """Loads, and what is in their way. A load may find another under way, and is then that one."""
        node = self._world.machines[request.nodes[0] % len(self._world.machines)].name if request.nodes else None
        requester = Requester(author=author, key=key)
        target = node or self._world.machines[0].name

        async def load(to: Frontend) -> str:
            found = await to.loader.request(request.name, node, author, key)
            return found if isinstance(found, str) else ""

        async def resume(to: Frontend) -> str:
            await to.nodes.resume(target)
            return ""

        async def ask(to: Frontend) -> str:
            match request.kind:
                case "unload":
                    return await to.operations.request_unload(request.name, node, requester)
                case "delete_model":
                    return await to.operations.request_model_delete(request.name, requester)
                case _:
                    return await to.operations.request_drain(target, requester)

        if request.kind == "resume":  # which has no key
            found = await self._ask_once(request.frontend, author, resume, f"{request.kind} {node}")
        else:
            asked = load if request.kind == "load" else ask
            found = await self._request(request, author, asked, f"{request.kind} {request.name} {node}")
        if found:
            row = self._world.checks.operations[found]
            self._keep(request.number, OperationId(found), row.kind, row.name, row.author)

    async def resume_all(self) -> None:
        """The operator gives every node work again, so that all that was accepted can end."""
        world = self._world
        for at in range(RESUME_TRIES):
            rows = select_rows(world.database.connection, "select id from nodes where drained")
            if not rows:
                return
            frontend = world.frontends[at % len(world.frontends)]
            with contextlib.suppress(EnginehouseError):
                await frontend.call(lambda to: to.nodes.resume(str(rows[0][0])), ANSWER_SECONDS)  # noqa: B023
            await asyncio.sleep(RESUME_PAUSE_SECONDS)

    def _backend_request(self, request: SimRequest) -> BackendRequest:
        machines = self._world.machines
        assert request.kind in ("install", "upgrade", "delete")
        return BackendRequest(
            kind=request.kind,
            name=request.name,
            nodes=tuple(dict.fromkeys(machines[one % len(machines)].name for one in request.nodes)) or None,
            force=request.force or request.kind == "delete",  # also where models run
            max_parallel=request.max_parallel,
        )

    def _keep(self, number: int, operation_id: OperationId, kind: str, name: str, author: str) -> None:
        if operation_id:
            accepted = Accepted(operation_id, kind, name, author)
            self.accepted.append(accepted)
            self._by_request[number] = accepted

    async def _request(self, request: SimRequest, author: str, ask: Ask, what: str) -> str:
        """The id of the operation; empty where the client heard no, or nothing."""
        if not request.is_keyed:
            return await self._ask_once(request.frontend, author, ask, what)
        self.keyed.append(author)
        told = ""
        for attempt in range(TRIES):
            told = await self._ask_once(request.frontend + attempt, author, ask, what)
            if author in self._told or author in self.refused:
                break
            await asyncio.sleep(PAUSE_SECONDS)
        if told and self._world.chance("clients").random() < REPEAT_RATE:
            again = await self._ask_once(request.frontend + 1, author, ask, what)
            if again not in ("", told):
                self._fail("G4", f"{author} was told {told} and then {again} under one key")
        return told

    async def _ask_once(self, at: int, author: str, ask: Ask, what: str) -> str:
        world = self._world
        frontend = world.frontends[at % len(world.frontends)]
        world.trace.note(author, f"asks {frontend.name} to {what}")
        try:
            operation_id = await frontend.call(ask, ANSWER_SECONDS)
        except EnginehouseError as error:
            world.trace.note(author, f"hears {error.code}")
            if error.code in LOST:
                self._unheard.add(author)
            else:
                self._judge_refusal(author, error)
            return ""
        world.trace.note(author, f"is told {operation_id[:8]}")
        self._told.add(author)
        if operation_id and operation_id not in world.checks.operations:
            self._fail("G1", f"{author} was told {operation_id}, which is not in the store")
        return operation_id

    def _judge_refusal(self, author: str, error: EnginehouseError) -> None:
        """G1: not accepted means no effect at all. A commit that the store itself did not confirm is nobody's lie, and
        that the store cannot be asked now says nothing of a try whose answer got lost.
        """
        world = self._world
        if author in self._told:
            return
        says_nothing = error.code == "store_unavailable" and author in self._unheard
        if author in world.confirmed and not says_nothing:
            self._fail("G1", f"{author} was refused ({error.code}), yet operation {world.confirmed[author]} is there")
        if error.code != "store_unavailable":
            self.refused.append(author)

    async def _cancel(self, author: str, request: SimRequest) -> None:
        """Cancelling has no id to be told; what it promises is that nothing of the operation is open afterwards."""
        world, about = self._world, self._by_request.get(request.about)
        if about is None:
            return
        frontend = world.frontends[request.frontend % len(world.frontends)]
        world.trace.note(author, f"asks {frontend.name} to cancel {about.operation_id[:8]}")
        try:
            await frontend.call(lambda to: to.cancellation.cancel(about.operation_id, None, author), ANSWER_SECONDS)
        except EnginehouseError as error:
            world.trace.note(author, f"hears {error.code}")
            return
        world.trace.note(author, f"has cancelled {about.operation_id[:8]}")

    async def _remove_node(self, author: str, request: SimRequest) -> None:
        """The machine stays and joins again, as another node."""
        world = self._world
        frontend = world.frontends[request.frontend % len(world.frontends)]
        machine = world.machines[(request.nodes or (0,))[0] % len(world.machines)]
        world.trace.note(author, f"asks {frontend.name} to remove {machine.name}")
        try:
            await frontend.call(lambda to: to.cancellation.remove_node(machine.name, author), ANSWER_SECONDS)
        except EnginehouseError as error:
            world.trace.note(author, f"hears {error.code}")

    def _fail(self, guarantee: str, message: str) -> None:
        self._world.loop.fail(Violation(guarantee, message))
