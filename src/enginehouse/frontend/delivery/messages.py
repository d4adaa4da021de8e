"""Encodes an intent as LocalAI's message for its action, with additional fields.

Enginehouse workers use `command` and `resolved`. LocalAI's workers ignore both: they get a plain name and the galleries
to look it up in, or a URI with a name.
"""

from __future__ import annotations

from typing import Any, assert_never

from msgspec import Struct

from enginehouse.core import subjects, wire
from enginehouse.core.action import (
    InstallBackend,
    PullModel,
    RemoveBackend,
    RemoveModel,
    StartReplica,
    StopReplica,
    UnknownAction,
)
from enginehouse.core.errors import Hopeless
from enginehouse.core.ids import OperationId
from enginehouse.core.intent import Intent
from enginehouse.core.peer import FilePeer
from enginehouse.core.replica import process_key


class Sent(Struct, frozen=True):
    subject: str
    payload: bytes


def encode_command(intent: Intent, operation_id: OperationId, peers: tuple[FilePeer, ...] = ()) -> Sent:
    """Return the message for an intent. `peers` may have the files of a pull."""
    command = command_of(intent)
    action = intent.action
    match action:
        case InstallBackend() if action.upgrade:
            verb = subjects.UPGRADE
            message: Struct = wire.BackendUpgradeRequest(**_placement(action, operation_id, command))
        case InstallBackend():
            verb = subjects.INSTALL
            message = _install(action, operation_id, command, force=action.force)
        case RemoveBackend():
            verb = subjects.DELETE
            # The directory, which means the same on every worker; the pointer's name only if the worker would
            # otherwise leave the pointer behind.
            name = action.called or action.directory
            message = wire.BackendDeleteRequest(backend=name, op_id=operation_id, command=command)
        case PullModel():
            verb = subjects.PULL_MODEL
            message = wire.ModelPullRequest(model=action.model, op_id=operation_id, command=command, peers=peers)
        case RemoveModel():
            verb = subjects.DELETE_MODEL
            message = wire.ModelDeleteRequest(model_name=action.model, op_id=operation_id, command=command)
        case StartReplica():
            verb = subjects.INSTALL
            message = wire.BackendInstallRequest(
                backend=action.directory,
                model_id=action.model.name,
                replica_index=action.slot,
                op_id=operation_id,
                command=command,
                model=wire.ModelStart(model=action.model, key=action.key, files=action.files),
            )
        case StopReplica():
            verb = subjects.STOP_MODEL
            message = wire.ModelStopRequest(
                model_name=action.model,
                process_key=process_key(action.model, action.slot),
                expected_address="",
                op_id=operation_id,
                command=command,
                drain_seconds=action.drain_seconds,
            )
        case UnknownAction():
            raise Hopeless(
                f"cannot send intent {intent.id}: a newer version of Enginehouse wrote it", code="unsupported"
            )
        case _:
            assert_never(action)
    return Sent(subjects.node_subject(intent.node_id, verb), wire.encode(message))


def encode_forced(intent: Intent, operation_id: OperationId) -> Sent:
    """Return an upgrade as an install with `force`, for workers that do not know upgrades."""
    if not isinstance(intent.action, InstallBackend):
        raise Hopeless(f"cannot force intent {intent.id}: it is not an install", code="unsupported")
    message = _install(intent.action, operation_id, command_of(intent), force=True)
    return Sent(subjects.node_subject(intent.node_id, subjects.INSTALL), wire.encode(message))


def encode_cancel(intent: Intent) -> Sent:
    return Sent(
        subjects.node_subject(intent.node_id, subjects.CANCEL), wire.encode(wire.CancelRequest(intent=intent.id))
    )


def command_of(intent: Intent) -> wire.Command:
    return wire.Command(intent=intent.id, generation=intent.generation, attempt=intent.attempt, fence=intent.fence)


def _install(
    action: InstallBackend, operation_id: OperationId, command: wire.Command, *, force: bool
) -> wire.BackendInstallRequest:
    return wire.BackendInstallRequest(**_placement(action, operation_id, command), force=force, keep=action.keep)


def _placement(action: InstallBackend, operation_id: OperationId, command: wire.Command) -> dict[str, Any]:
    """The fields that an install and an upgrade share."""
    build = action.resolved
    external = {"uri": build.uri, "name": build.directory, "alias": build.alias} if action.is_external else {}
    return {
        "backend": action.backend,
        "backend_galleries": action.galleries,
        "op_id": operation_id,
        "command": command,
        "resolved": build,
        "rolling": True,  # the reconciler replaces what runs
        **external,
    }
