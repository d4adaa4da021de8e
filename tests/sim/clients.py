"""People and programs that wish for things, and remember what they were told.

Every request has an author of its own, so that what it left behind can be told from what another left.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from msgspec import Struct
from tests.sim.options import Wish
from tests.sim.trace import Violation

from enginehouse.core.errors import EnginehouseError
from enginehouse.frontend.operations import BackendWish

if TYPE_CHECKING:
    from tests.sim.world import World

ANSWER_SECONDS = 30.0
_LOST = frozenset({"connection_lost", "connection_refused"})


class Accepted(Struct, frozen=True):
    operation_id: str
    wish: BackendWish


class Clients:
    def __init__(self, world: World) -> None:
        self._world = world
        self.accepted: list[Accepted] = []
        self.refused: list[str] = []  # authors who were told no

    async def ask(self, number: int, wish: Wish) -> None:
        world = self._world
        await asyncio.sleep(wish.at)
        frontend = world.frontends[wish.frontend % len(world.frontends)]
        nodes = tuple(world.machines[one % len(world.machines)].name for one in wish.nodes)
        asked = BackendWish(
            kind=wish.kind,
            name=wish.name,
            author=f"client-{number}",
            nodes=tuple(dict.fromkeys(nodes)) or None,
            force=wish.force,
        )
        world.trace.note(asked.author, f"asks {frontend.name} to {asked.kind} {asked.name} on {nodes or 'all'}")
        try:
            operation_id = await frontend.call(lambda to: to.operations.request(asked), ANSWER_SECONDS)
        except EnginehouseError as error:
            world.trace.note(asked.author, f"hears {error.code}")
            if error.code not in _LOST:
                self._judge_refusal(asked.author, error)
            return
        world.trace.note(asked.author, f"is told {operation_id[:8]}")
        self.accepted.append(Accepted(operation_id, asked))
        if operation_id not in world.checks.operations:
            world.loop.fail(Violation("G1", f"{asked.author} was told {operation_id}, which is not in the store"))

    def _judge_refusal(self, author: str, error: EnginehouseError) -> None:
        """G1: not accepted means no effect at all. A commit that the store itself did not confirm is nobody's lie."""
        world = self._world
        if author in world.confirmed:
            world.loop.fail(
                Violation("G1", f"{author} was refused ({error.code}), yet operation {world.confirmed[author]} is there")
            )
        if error.code != "store_unavailable":
            self.refused.append(author)
