"""What can be done on a node: a tagged union, stored whole in the intent's row and sent whole to the worker.

A new Action is added here; the type checker then lists every `match` that must know it.
"""

from __future__ import annotations

from typing import assert_never

import msgspec
from msgspec import Struct

from enginehouse.core.backend import Resolved
from enginehouse.core.model import Model
from enginehouse.core.reference import parse_uri
from enginehouse.core.replica import process_key


class InstallBackend(Struct, tag="install_backend", frozen=True, omit_defaults=True, kw_only=True):
    """Make `resolved` be in its directory. An upgrade is this with another digest (it travels on its own subject)."""

    backend: str
    resolved: Resolved
    force: bool = False
    upgrade: bool = False
    keep: bool = False  # whatever version is in the directory will do; `resolved` is for where there is none
    # For LocalAI's workers, which resolve by themselves: where to look the name up, or that there is only an address.
    galleries: str = ""
    is_external: bool = False
    # When such a worker had put in place what it had before ("" for nothing), by its own clock; None: not known.
    before: str | None = None


class RemoveBackend(Struct, tag="remove_backend", frozen=True, omit_defaults=True, kw_only=True):
    backend: str
    directory: str
    called: str = ""  # the name of a pointer to it on one of LocalAI's workers, which removes both under that name


class PullModel(Struct, tag="pull_model", frozen=True, omit_defaults=True, kw_only=True):
    model: Model


class RemoveModel(Struct, tag="remove_model", frozen=True, omit_defaults=True, kw_only=True):
    """Have no file of the model on the node, and no process that serves it."""

    model: str


class StartReplica(Struct, tag="start_replica", frozen=True, omit_defaults=True, kw_only=True):
    model: Model
    slot: int
    directory: str  # the backend that runs it
    key: str  # presented as Bearer to the engine; made by the frontend, one per replica
    # The newest request about the model's files on that node when this was requested: a removal after it wins. None:
    # unknown.
    files: int | None = None


class StopReplica(Struct, tag="stop_replica", frozen=True, omit_defaults=True, kw_only=True):
    model: str
    slot: int
    drain_seconds: float = 0.0  # how long answers under way may still take


class UnknownAction(Struct, tag="foreign", frozen=True, kw_only=True):
    """An action that a newer version wrote into the store: shown, neither run nor removed."""

    text: str
    subject: str


Action = InstallBackend | RemoveBackend | PullModel | RemoveModel | StartReplica | StopReplica | UnknownAction


def subject_of(action: Action) -> str:
    """What the action is about. Generation, supersession and the worker's lock are per (node, subject)."""
    match action:
        case InstallBackend():
            return f"backend:{action.resolved.directory}"
        case RemoveBackend():
            return f"backend:{action.directory}"
        case PullModel():
            return f"model:{action.model.name}"
        case RemoveModel():
            return f"model:{action.model}"
        case StartReplica():
            return f"replica:{process_key(action.model.name, action.slot)}"
        case StopReplica():
            return f"replica:{process_key(action.model, action.slot)}"
        case UnknownAction():
            return action.subject
        case _:
            assert_never(action)


def is_same_request(wanted: Action, open_one: Action) -> bool:
    """Whether a new request may join an open intent instead of superseding it.

    A replica's key is made anew with every request, so it does not make two requests different; nor do its files,
    because whoever has them removed also ends the open starts.
    """
    if isinstance(wanted, StartReplica) and isinstance(open_one, StartReplica):
        return (wanted.model, wanted.slot, wanted.directory) == (
            open_one.model,
            open_one.slot,
            open_one.directory,
        )
    if isinstance(wanted, InstallBackend) and isinstance(open_one, InstallBackend):
        return _is_same_install(wanted, open_one)
    if isinstance(wanted, RemoveBackend) and isinstance(open_one, RemoveBackend):
        return (wanted.directory, wanted.called) == (open_one.directory, open_one.called)
    return wanted == open_one


def _is_same_install(wanted: InstallBackend, open_one: InstallBackend) -> bool:
    """Whether the open one leaves what is wanted: the same build, or any of it where any will do, whatever name each
    was asked for by. A digest that one of them does not know yet is found in the same place. What must be fetched anew,
    or looked for, joins only its like.
    """
    first, second = wanted.resolved, open_one.resolved
    if (first.directory, first.uri, first.sha256) != (second.directory, second.uri, second.sha256):
        return False
    if wanted.keep:
        return True
    return (
        len({first.digest, second.digest} - {""}) <= 1
        and not open_one.keep
        and (open_one.force or not wanted.force)
        and (open_one.upgrade or not wanted.upgrade)
    )


def pointer_of(action: Action) -> str:
    """The meta name that an action lets stand for its build; "" where there is none."""
    if not isinstance(action, InstallBackend) or action.resolved.meta == action.resolved.directory:
        return ""
    return action.resolved.meta


def pointing(done: InstallBackend, meta: str, digest: str) -> InstallBackend:
    """What is left to do for a request that joined an install under another name: that name is to lead to the build
    as well. A worker of ours finds the build in place and writes the pointer. One of LocalAI's takes one name with each
    message, so it is asked to install that name, which fetches the build once more and writes the pointer.
    """
    build = msgspec.structs.replace(done.resolved, meta=meta, digest=digest or done.resolved.digest)
    is_image = parse_uri(build.uri).kind == "image"
    return InstallBackend(backend=meta, resolved=build, keep=done.keep or is_image, galleries=done.galleries)


def kind_of(action: Action) -> str:
    """The stable name of the action's type, as stored and shown to programs."""
    return str(action.__struct_config__.tag)


def phrase(action: Action) -> str:
    """What is being done, for messages and logs: "install llama-cpp"."""
    match action:
        case InstallBackend():
            return f"{'upgrade' if action.upgrade else 'install'} {action.backend}"
        case RemoveBackend():
            return f"delete {action.backend}"
        case PullModel():
            return f"place the files of {action.model.name}"
        case RemoveModel():
            return f"remove the files of {action.model}"
        case StartReplica():
            return f"start {action.model.name}"
        case StopReplica():
            return f"stop {action.model}"
        case UnknownAction():
            return f"something that a newer version asked for ({action.subject})"
        case _:
            assert_never(action)
