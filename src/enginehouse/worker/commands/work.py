"""A decoded command as the executor takes it, and the conversion of an error to an outcome."""

from __future__ import annotations

from msgspec import Struct

from enginehouse.core import wire
from enginehouse.core.action import Action, InstallBackend
from enginehouse.core.errors import EnginehouseError, can_heal
from enginehouse.core.intent import Outcome
from enginehouse.core.peer import FilePeer


class Work(Struct, frozen=True, kw_only=True):
    """One command, decoded."""

    action: Action
    op_id: str = ""
    about: str = ""
    command: wire.Command | None = None
    expected_address: str = ""  # of a stop: stop only the process at this address
    is_kept: bool = False  # of an install: keep the installed version
    # Of a start that a LocalAI frontend requests: the install of a backend that is not on this node yet.
    install_first: InstallBackend | None = None
    peers: tuple[FilePeer, ...] = ()  # of a pull: nodes that may have its files


def outcome_of(error: EnginehouseError) -> Outcome:
    return Outcome(code=error.code, message=error.message, can_heal=can_heal(error))
