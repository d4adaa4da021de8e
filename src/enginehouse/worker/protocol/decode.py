"""Decodes messages of the bus to actions, and encodes outcomes as replies: LocalAI's formats with additional fields.

`read` parses a message once. `head_of` identifies it, so that its arrival can be reported before names are resolved.
`work_of` builds the work, with names resolved by `names`. This module executes nothing.
"""

from __future__ import annotations

from msgspec import Struct

from enginehouse.core import subjects, wire
from enginehouse.core.action import (
    Action,
    InstallBackend,
    PullModel,
    RemoveBackend,
    RemoveModel,
    StartReplica,
    StopReplica,
)
from enginehouse.core.backend import Resolved
from enginehouse.core.errors import Invalid
from enginehouse.core.intent import Outcome
from enginehouse.core.model import Model
from enginehouse.core.replica import parse_process_key, process_key
from enginehouse.worker.commands.work import Work
from enginehouse.worker.protocol.names import (
    KnownNames,
    build_for,
    find_usable,
    installed_directory,
    literal_directory,
    model_name,
)

MAX_KEY = 300  # a model's name and a number; Python refuses to parse numbers of thousands of digits
MAX_DRAIN_SECONDS = 3600.0  # the longest time an engine may take for one answer
MAX_SLOT = 1000  # more replicas of one model on one machine are an error

WorkRequest = (
    wire.BackendInstallRequest
    | wire.BackendUpgradeRequest
    | wire.BackendDeleteRequest
    | wire.ModelStopRequest
    | wire.ModelPullRequest
    | wire.ModelDeleteRequest
)


class Head(Struct, frozen=True, kw_only=True):
    """The identification of a message. `command` is None if a frontend without intents sent it."""

    op_id: str = ""
    about: str = ""  # the backend or model, as named in the request
    command: wire.Command | None = None


class LookUps(Struct, frozen=True, kw_only=True):
    """What must be loaded before the names in a message can be resolved."""

    installed: bool = False
    aliases: bool = False
    galleries: str | None = None  # in LocalAI's format; None if no gallery is needed


def read(verb: str, payload: bytes) -> WorkRequest:
    """Parse the request in a message. Raises `Malformed` or `Invalid`."""
    match verb:
        case subjects.INSTALL:
            return wire.decode(payload, wire.BackendInstallRequest, "the install request")
        case subjects.UPGRADE:
            return wire.decode(payload, wire.BackendUpgradeRequest, "the upgrade request")
        case subjects.DELETE:
            return wire.decode(payload, wire.BackendDeleteRequest, "the delete request")
        case subjects.STOP_MODEL:
            return wire.decode(payload, wire.ModelStopRequest, "the stop request")
        case subjects.PULL_MODEL:
            return wire.decode(payload, wire.ModelPullRequest, "the pull request")
        case subjects.DELETE_MODEL:
            return wire.decode(payload, wire.ModelDeleteRequest, "the request to delete a model")
        case _:
            raise Invalid(f"cannot do {verb!r}: this worker does not support it", code="unsupported")


def head_of(request: WorkRequest) -> Head:
    match request:
        case wire.BackendInstallRequest():
            about = request.model_id or request.backend or request.name
        case wire.BackendUpgradeRequest():
            about = request.backend or request.name
        case wire.BackendDeleteRequest():
            about = request.backend
        case wire.ModelPullRequest():
            about = request.model.name
        case wire.ModelStopRequest() | wire.ModelDeleteRequest():
            about = request.model_name
    return Head(op_id=request.op_id, about=about, command=request.command)


def look_ups_for(request: WorkRequest, known: KnownNames | None = None) -> LookUps:
    """Without `known`: what must be read from disk. With `known`: whether galleries are needed as well."""
    match request:
        case wire.BackendInstallRequest() if request.model_id and request.model is not None:
            return LookUps(installed=True)
        case wire.BackendInstallRequest() if request.model_id:
            if known is not None and (request.uri or _is_usable(request, known)):
                return LookUps()
            return LookUps(installed=True, aliases=True, galleries=request.backend_galleries if known else None)
        case wire.BackendInstallRequest() | wire.BackendUpgradeRequest():
            if request.resolved or request.uri or not request.backend:
                return LookUps()
            if known is not None and _is_there(request, known):
                return LookUps()
            return LookUps(installed=True, aliases=True, galleries=request.backend_galleries)
        case wire.BackendDeleteRequest():
            return LookUps(installed=True, aliases=request.command is None)
        case _:
            return LookUps()


def work_of(request: WorkRequest, known: KnownNames) -> Work:
    """Build the work for a request. Raises an `EnginehouseError` if the request is invalid."""
    match request:
        case wire.BackendInstallRequest() if request.model_id and request.model is None:
            return _start_process(request, known)
        case wire.BackendInstallRequest() if request.model_id:
            action: Action = _start(request, known)
        case wire.BackendInstallRequest() if _is_there(request, known):
            return _keep(request, known)
        case wire.BackendInstallRequest():
            action = InstallBackend(
                backend=request.backend or request.name,
                resolved=build_for(request, known),
                force=request.force,
                keep=request.keep,
                rolling=request.rolling,
            )
        case wire.BackendUpgradeRequest():
            action = InstallBackend(
                backend=request.backend or request.name,
                resolved=build_for(request, known),
                upgrade=True,
                rolling=request.rolling,
            )
        case wire.BackendDeleteRequest():
            find = installed_directory if request.command is None else literal_directory
            action = RemoveBackend(backend=request.backend, directory=find(known, request.backend))
        case wire.ModelStopRequest():
            action = _stop(request)
        case wire.ModelPullRequest():
            model_name(request.model.name)
            action = PullModel(model=request.model)
        case wire.ModelDeleteRequest():
            action = RemoveModel(model=model_name(request.model_name))
    head = head_of(request)
    expected = request.expected_address if isinstance(request, wire.ModelStopRequest) else ""
    return Work(
        action=action,
        op_id=head.op_id,
        about=head.about,
        command=head.command,
        expected_address=expected,
        peers=request.peers if isinstance(request, wire.ModelPullRequest) else (),
    )


def _is_there(request: wire.BackendInstallRequest | wire.BackendUpgradeRequest, known: KnownNames) -> bool:
    """Whether the request gives only a name and that backend is installed, so that nothing has to be done."""
    return (
        isinstance(request, wire.BackendInstallRequest)
        and not (request.command or request.force or request.resolved or request.uri or request.model_id)
        and find_usable(known, request.backend) is not None
    )


def _keep(request: wire.BackendInstallRequest, known: KnownNames) -> Work:
    backend = find_usable(known, request.backend)
    assert backend is not None, "called only for an installed backend"
    resolved = Resolved(directory=backend.name, uri=backend.uri, digest=backend.digest)
    return Work(
        action=InstallBackend(backend=request.backend, resolved=resolved),
        op_id=request.op_id,
        about=request.backend,
        command=request.command,
        is_kept=True,
    )


def _start(request: wire.BackendInstallRequest, known: KnownNames) -> StartReplica:
    model_name(request.model_id)
    _check_slot(request.replica_index)
    assert request.model is not None, "called only for a request with a model"
    if request.model.model.name != request.model_id:
        raise Invalid(f"cannot start {request.model_id}: the request contains another model", code="invalid_name")
    return StartReplica(
        model=request.model.model,
        slot=request.replica_index,
        directory=literal_directory(known, request.backend),
        key=request.model.key,
        files=request.model.files,
    )


def _is_usable(request: wire.BackendInstallRequest, known: KnownNames) -> bool:
    return not request.force and find_usable(known, request.backend) is not None


def _start_process(request: wire.BackendInstallRequest, known: KnownNames) -> Work:
    """The start of a process for a LocalAI frontend, which installs what is missing and loads the model itself."""
    model_name(request.model_id)
    _check_slot(request.replica_index)
    install: InstallBackend | None = None
    if _is_usable(request, known):
        backend = find_usable(known, request.backend)
        assert backend is not None, "checked by the condition"
        directory = backend.name
    else:
        build = build_for(request, known)
        install = InstallBackend(backend=request.backend or request.name, resolved=build, force=request.force)
        directory = build.directory
    action = StartReplica(
        model=Model(name=request.model_id, backend=directory, files=()),
        slot=request.replica_index,
        directory=directory,
        key="",
        process_only=True,
    )
    return Work(action=action, op_id=request.op_id, about=request.backend or request.model_id, install_first=install)


def _stop(request: wire.ModelStopRequest) -> StopReplica:
    if len(request.process_key) > MAX_KEY:
        raise Invalid(
            f"cannot stop {request.process_key[:40]!r}…: the process key is longer than {MAX_KEY} characters",
            code="invalid_name",
        )
    model, slot = parse_process_key(request.process_key)
    model_name(model)
    _check_slot(slot)
    return StopReplica(model=model, slot=slot, drain_seconds=min(max(request.drain_seconds, 0.0), MAX_DRAIN_SECONDS))


def _check_slot(slot: int) -> None:
    if not 0 <= slot < MAX_SLOT:
        raise Invalid(f"cannot use {slot} as a replica index: it must be 0 to {MAX_SLOT - 1}", code="invalid_name")


def encode_reply(verb: str, outcome: Outcome, work: Work | None) -> bytes:
    """Encode an outcome in the reply format of the verb. `work` is None if the message could not be decoded."""
    error = outcome.message if outcome.code else ""
    match verb:
        case subjects.INSTALL:
            reply: Struct = wire.BackendInstallReply(
                success=outcome.succeeded, address=outcome.address, error=error, outcome=outcome
            )
        case subjects.UPGRADE | subjects.DELETE:
            reply = wire.BackendUpgradeReply(
                success=outcome.succeeded,
                error=error,
                stopped_process_keys=outcome.stopped,
                reports_stopped_processes=True,
                outcome=outcome,
            )
        case subjects.STOP_MODEL:
            stopped = work.action if work is not None and isinstance(work.action, StopReplica) else None
            key = process_key(stopped.model, stopped.slot) if stopped else ""
            # A process that ended all the same is a success with an error, as in LocalAI.
            unfreed = f"cannot free {key}: its engine did not release the model" if outcome.freed is False else ""
            reply = wire.ModelStopReply(
                matched=bool(outcome.stopped) or outcome.code in ("conflict", "process_survived"),
                freed=bool(outcome.freed),
                terminated=outcome.succeeded,
                process_key=key,
                address=outcome.address,
                error=error or unfreed,
                outcome=outcome,
            )
        case subjects.UNLOAD:
            reply = wire.ModelUnloadReply(success=outcome.succeeded, error=error)
        case subjects.LIST:
            reply = wire.BackendListReply(backends=None, error=error)
        case subjects.RUNNING:
            reply = wire.ModelsRunningReply(models=(), error=error)
        case _:
            reply = wire.ModelPullReply(success=outcome.succeeded, error=error, outcome=outcome)
    return wire.encode(reply)
