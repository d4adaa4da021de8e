"""One command as the executor takes it, decoded from a message, and an error as the outcome of one."""

from __future__ import annotations

from msgspec import Struct

from enginehouse.core import wire
from enginehouse.core.action import Action
from enginehouse.core.errors import EnginehouseError, can_heal
from enginehouse.core.intent import Outcome


class Work(Struct, frozen=True, kw_only=True):
    """One command, decoded."""

    action: Action
    op_id: str = ""
    about: str = ""
    command: wire.Command | None = None
    expected_address: str = ""  # of a stop: only the process there is meant
    is_kept: bool = False  # of an install: what is installed there is what is asked for


def outcome_of(error: EnginehouseError) -> Outcome:
    return Outcome(code=error.code, message=error.message, can_heal=can_heal(error))
