"""Messages from the bus as Actions, and outcomes as replies: LocalAI's shapes with our additive fields.

A message of ours carries its intent and the resolved build, which is obeyed. One of a Go frontend carries only names,
looked up for this machine in the galleries it names, or the address of an image. The bus is not trusted, so every name
is checked here, before anything acts on it, and files of this machine are never what is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from enginehouse.core import wire
from enginehouse.core.action import Action, InstallBackend, PullModel, RemoveBackend, StartReplica, StopReplica
from enginehouse.core.backend import InstalledBackend, Resolved, package_digest
from enginehouse.core.errors import EnginehouseError, Invalid, NotFound, can_heal
from enginehouse.core.gallery import Gallery, resolve
from enginehouse.core.installation import check_directory, directory_behind
from enginehouse.core.intent import Outcome
from enginehouse.core.name import check_model_name
from enginehouse.core.reference import parse_uri, shown_uri
from enginehouse.core.replica import parse_process_key, process_key
from enginehouse.fetch.galleries import load_builtin
from enginehouse.host import hardware

Verb = Literal["backend.install", "backend.upgrade", "backend.delete", "model.stop", "model.pull"]
MAX_SLOT = 1000  # more replicas of one model on one machine are a mistake


class Work(Struct, frozen=True, kw_only=True):
    """One command, decoded. `command` is None when a frontend without intents sent it."""

    action: Action
    op_id: str = ""
    about: str = ""  # the backend or model, in the words of the request
    command: wire.Command | None = None
    expected_address: str = ""  # of a stop: only the process there is meant


class Known(Struct, frozen=True, kw_only=True):
    """What a name can mean here."""

    installed: Sequence[InstalledBackend] = ()
    galleries: Sequence[Gallery] = ()


def galleries_wanted(verb: str, payload: bytes) -> str | None:
    """The list of galleries that a message's name has to be looked up in; None where it has not."""
    if verb not in (wire.INSTALL, wire.UPGRADE):
        return None
    request = wire.decode(payload, wire.BackendInstallRequest, "the request")
    return None if request.resolved or request.uri or request.model_id else request.backend_galleries


def decode(verb: str, payload: bytes, known: Known) -> Work:
    """The work that a message asks for; raises one of our errors for anything else."""
    installed = known.installed
    match verb:
        case wire.INSTALL:
            return _install(wire.decode(payload, wire.BackendInstallRequest, "the install request"), known)
        case wire.UPGRADE:
            upgrade = wire.decode(payload, wire.BackendUpgradeRequest, "the upgrade request")
            return Work(
                action=InstallBackend(backend=upgrade.backend, resolved=_resolved(upgrade, known), upgrade=True),
                op_id=upgrade.op_id,
                about=upgrade.backend,
                command=upgrade.command,
            )
        case wire.DELETE:
            delete = wire.decode(payload, wire.BackendDeleteRequest, "the delete request")
            return Work(
                action=RemoveBackend(
                    backend=delete.backend, directory=_directory(delete.backend, installed, delete.command is not None)
                ),
                op_id=delete.op_id,
                about=delete.backend,
                command=delete.command,
            )
        case wire.STOP_MODEL:
            return _stop(wire.decode(payload, wire.ModelStopRequest, "the stop request"))
        case wire.PULL_MODEL:
            pull = wire.decode(payload, wire.ModelPullRequest, "the pull request")
            check_model_name(pull.model.name)
            return Work(
                action=PullModel(model=pull.model), op_id=pull.op_id, about=pull.model.name, command=pull.command
            )
        case _:
            raise Invalid(f"cannot do {verb!r}: this worker does not know it", code="unsupported")


def _install(request: wire.BackendInstallRequest, known: Known) -> Work:
    if not request.model_id:
        action: Action = InstallBackend(
            backend=request.backend, resolved=_resolved(request, known), force=request.force
        )
        return Work(action=action, op_id=request.op_id, about=request.backend, command=request.command)
    check_model_name(request.model_id)
    _check_slot(request.replica_index)
    if request.model is None:
        raise Invalid(
            f"cannot start {request.model_id}: engines of this worker take their model at start, "
            "and the request does not carry one; ask through an Enginehouse frontend",
            code="unsupported",
        )
    if request.model.model.name != request.model_id:
        raise Invalid(f"cannot start {request.model_id}: the request carries another model", code="invalid_name")
    action = StartReplica(
        model=request.model.model,
        slot=request.replica_index,
        directory=_directory(request.backend, known.installed, True),
        key=request.model.key,
    )
    return Work(action=action, op_id=request.op_id, about=request.model_id, command=request.command)


def _stop(request: wire.ModelStopRequest) -> Work:
    model, slot = parse_process_key(request.process_key)
    check_model_name(model)
    _check_slot(slot)
    return Work(
        action=StopReplica(model=model, slot=slot),
        op_id=request.op_id,
        about=request.model_name,
        command=request.command,
        expected_address=request.expected_address,
    )


def _check_slot(slot: int) -> None:
    if not 0 <= slot < MAX_SLOT:
        raise Invalid(f"cannot use {slot} as a replica index: it must be 0 to {MAX_SLOT - 1}", code="invalid_name")


def _resolved(request: wire.BackendInstallRequest | wire.BackendUpgradeRequest, known: Known) -> Resolved:
    if request.resolved is not None:
        return request.resolved
    if request.uri:
        return _external(request.uri, request.name or request.backend, request.alias)
    # `gallery@name` chooses among the frontend's galleries, which are these.
    return _resolve(request.backend, known.galleries or (load_builtin(),))


def _external(uri: str, name: str, alias: str) -> Resolved:
    source = parse_uri(uri)
    if source.kind in ("directory", "ocifile"):
        raise Invalid(
            f"cannot install from {shown_uri(uri)}: files of this machine are installed with `enginehouse local`",
            code="uri_not_allowed",
            param="uri",
        )
    digest = package_digest(uri, (), "", "") if source.kind == "package" else ""
    return Resolved(directory=check_directory(name), uri=uri, digest=digest, alias=alias)


def _resolve(name: str, galleries: Sequence[Gallery]) -> Resolved:
    try:
        return resolve(galleries, name, hardware.capability(), hardware.platform())
    except NotFound:
        if "@" not in name:
            raise
        # A frontend calls its galleries what it likes; the entry is what was meant.
        return resolve(galleries, name.rpartition("@")[2], hardware.capability(), hardware.platform())


def _directory(name: str, installed: Sequence[InstalledBackend], may_be_absent: bool) -> str:
    """The directory that a name means on this node, whether it is its own, a meta name or one of the gallery."""
    plain = name.rpartition("@")[2]
    found = directory_behind(installed, plain)
    if found is not None:
        return check_directory(found)
    if not may_be_absent:
        raise NotFound(f"cannot find a backend named {plain!r} on this node", code="not_found")
    try:
        return _resolve(plain, (load_builtin(),)).directory
    except EnginehouseError:
        return check_directory(plain)


def outcome_of(error: EnginehouseError) -> Outcome:
    return Outcome(code=error.code, message=error.message, can_heal=can_heal(error))


def encode_reply(verb: str, outcome: Outcome, work: Work | None) -> bytes:
    """The reply for an outcome, in the shape of its verb; `work` is None when the message could not be read."""
    error = outcome.message if outcome.code else ""
    match verb:
        case wire.INSTALL:
            reply: Struct = wire.BackendInstallReply(
                success=outcome.succeeded, address=outcome.address, error=error, outcome=outcome
            )
        case wire.UPGRADE | wire.DELETE:
            reply = wire.BackendUpgradeReply(
                success=outcome.succeeded,
                error=error,
                stopped_process_keys=outcome.stopped,
                reports_stopped_processes=True,
                outcome=outcome,
            )
        case wire.STOP_MODEL:
            stopped = work.action if work is not None and isinstance(work.action, StopReplica) else None
            reply = wire.ModelStopReply(
                matched=bool(outcome.stopped) or outcome.code == "conflict",
                freed=False,
                terminated=outcome.succeeded,
                process_key=process_key(stopped.model, stopped.slot) if stopped else "",
                address=outcome.address,
                error=error,
                outcome=outcome,
            )
        case _:
            reply = wire.ModelPullReply(success=outcome.succeeded, error=error, outcome=outcome)
    return wire.encode(reply)
