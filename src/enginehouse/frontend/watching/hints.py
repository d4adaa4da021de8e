"""Tells other frontends on the bus that rows have changed, so that they look at once.

A hint says nothing but that: what changed is read from the store. One that is lost costs time only, because every
frontend asks the store too, in one statement, whether anything changed (`board.CATCH_UP_SECONDS`). It is sent after the
commit, and for many changes at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from enginehouse.core import subjects
from enginehouse.core.errors import EnginehouseError
from enginehouse.ports import Bus, Message

log = logging.getLogger(__name__)

HINT_SECONDS = 0.2  # between two hints of one frontend


class ChangeHints:
    def __init__(self, bus: Bus, owner: str, look: Callable[[], None]) -> None:
        """`look` is called when another frontend has changed something."""
        self._bus = bus
        self._subject = subjects.changed_subject(owner)
        self._look = look
        self._is_due = False

    async def listen(self) -> None:
        await self._bus.subscribe(subjects.ALL_CHANGED, self._take)

    def note(self) -> None:
        """This frontend has changed rows that others show."""
        self._is_due = True

    async def step(self) -> None:
        if not self._is_due or not self._bus.is_connected:
            return
        self._is_due = False
        try:
            await self._bus.publish(self._subject, b"")
        except EnginehouseError as error:
            log.debug("hint.unsent error=%s", error)

    def _take(self, message: Message) -> None:
        if message.subject != self._subject:
            self._look()
