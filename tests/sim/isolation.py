"""G5 while the run goes on: nobody waits for an unrelated one.

Two looks, twice a second of virtual time. A due intent of a healthy node is sent soon while the store and some frontend
are left in peace; a command that a worker has begins soon unless its own subject is being worked on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from tests.sim.frontends import PATIENCE
from tests.sim.rows import IntentRow, select_rows
from tests.sim.store import EPOCH
from tests.sim.trace import Violation

from enginehouse.frontend.localai.poller import LOST_AFTER_BUDGETS

if TYPE_CHECKING:
    from tests.sim.world import World

LOOK_SECONDS = 0.5
SENT_WITHIN_SECONDS = 6.0  # an interval of the dispatcher, and what a look may miss
BEGUN_WITHIN_SECONDS = 2.0
STOPS = ('{"type":"stop_replica"', '{"type":"remove_model"')  # all that a drained node gets to do
CALM_SECONDS = 5.0  # after a misfortune loops may still be backing off


class Isolation:
    def __init__(self, world: World) -> None:
        self._world = world
        self._due_since: dict[str, float] = {}
        self.is_everyone_calm = False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._look_at_due()
            self._look_at_waiting()

    def _look_at_due(self) -> None:
        world, now = self._world, self._world.loop.time()
        if not self._is_sending_promised():
            self._due_since.clear()
            return
        every = [one for one in world.checks.intents.values() if not one.is_ended]
        if not every:
            self._due_since.clear()
            return
        query = "select id, drained from nodes where health = 'healthy' and approved"
        drained = {str(node_id): bool(is_so) for node_id, is_so in select_rows(world.database.connection, query)}
        full = _full_lanes(every)
        # An old worker cannot be stopped, so what is newer waits for it; no longer than anybody waits for its word once
        # it has the command, which is known a question after the lease of the sender: the question or its answer may
        # be as late as the bus can be.
        has_said = EPOCH + now - LOST_AFTER_BUDGETS * PATIENCE.install_seconds - SENT_WITHIN_SECONDS
        late_seconds = 2 * world.bus_weather.late_seconds
        was_put_in_place = EPOCH + now - world.options.lease_seconds - SENT_WITHIN_SECONDS - late_seconds
        query = (
            "select node_id, subject, intent_id from lingering_commands"
            " where received_at > ? or (received_at = 0 and sent_at > ?)"
        )
        held = select_rows(world.database.connection, query, (has_said, was_put_in_place))
        due = [
            one
            for one in every
            if _is_due(one, EPOCH + now)
            and one.lane not in full
            and not any((one.node_id, one.subject) == row[:2] and one.id != row[2] for row in held)
            and one.node_id in drained
            and (not drained[one.node_id] or one.action.startswith(STOPS))
        ]
        self._due_since = {one.id: self._due_since.get(one.id, now) for one in due}
        for one in due:
            waited = now - self._due_since[one.id]
            if waited > SENT_WITHIN_SECONDS:
                world.loop.fail(
                    Violation("G5", f"intent {one.id} ({one.subject}) is due and was not sent for {waited} s")
                )

    def _is_sending_promised(self) -> bool:
        world = self._world
        if world.store_weather.unknown_rate and not self.is_everyone_calm:
            return False  # a loop that fails pauses, and such a store makes every loop fail
        calm = [one for one in world.frontends if one.objects and world.calm_seconds(one.name, "store") > CALM_SECONDS]
        return bool(calm)

    def _look_at_waiting(self) -> None:
        world, now = self._world, self._world.loop.time()
        for machine in world.machines:
            if machine.process is None or machine.is_old or world.calm_seconds(machine.name) < CALM_SECONDS:
                continue
            for (intent, attempt), since in machine.checks.idle_waits().items():
                if now - since > BEGUN_WITHIN_SECONDS:
                    world.loop.fail(
                        Violation(
                            "G5", f"{machine.name}: attempt {attempt} of {intent} has not begun for {now - since} s"
                        )
                    )


def _full_lanes(intents: Collection[IntentRow]) -> set[str]:
    """Lanes in which as many run as may."""
    running = Counter(one.lane for one in intents if one.lane and one.state == "running")
    return {one.lane for one in intents if one.lane and running[one.lane] >= one.lane_width}


def _is_due(intent: IntentRow, now: float) -> bool:
    return intent.state in ("accepted", "waiting") and intent.due_at <= now
