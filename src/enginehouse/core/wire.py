"""Messages on the bus: LocalAI's, plus additive fields that an old peer ignores. `core.subjects` has their subjects.

Go's rules hold by construction: a field without a default is always present, a field with one is omitted when it has
that value, unknown keys are ignored, `null` means absent. Payloads are decoded with `decode`, which turns every fault
of a peer into one error.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import Struct

from enginehouse.core.backend import InstalledBackend, Resolved
from enginehouse.core.errors import Malformed
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.intent import Outcome
from enginehouse.core.model import Model
from enginehouse.core.peer import FilePeer
from enginehouse.core.progress import Progress, format_bytes, parse_bytes
from enginehouse.core.reading import read_json
from enginehouse.core.replica import RunningReplica

MAX_MESSAGE_BYTES = 256 * 1024
# LocalAI workers put the last output of an engine into their error, of any length; 1 MiB is the limit of the bus.
MAX_REPLY_BYTES = 1024 * 1024
# Commands ----------------------------------------------------------------------------------------


class Command(Struct, frozen=True, kw_only=True):
    """The intent of a message (additive). Workers refuse a lower generation or fence than one they have seen."""

    intent: IntentId
    generation: int
    attempt: int
    fence: int


class ModelStart(Struct, frozen=True, kw_only=True):
    """The additive `model` of `backend.install`, for our workers and engines that take their model at start."""

    model: Model
    key: str
    files: int | None = None


class _BackendPlacement(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What an install and an upgrade both say: which build is to be in place."""

    backend: str
    backend_galleries: str = ""
    uri: str = ""
    name: str = ""
    alias: str = ""
    replica_index: int = 0
    op_id: str = ""
    # Additive.
    command: Command | None = None
    resolved: Resolved | None = None
    rolling: bool = False


class BackendInstallRequest(_BackendPlacement, frozen=True, omit_defaults=True, kw_only=True):
    model_id: str = ""
    force: bool = False
    # Additive.
    keep: bool = False
    model: ModelStart | None = None


class BackendInstallReply(Struct, frozen=True, omit_defaults=True, kw_only=True):
    success: bool
    address: str = ""
    error: str = ""
    # Additive.
    outcome: Outcome | None = None


class BackendUpgradeRequest(_BackendPlacement, frozen=True, omit_defaults=True, kw_only=True):
    pass


class BackendUpgradeReply(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The reply to `backend.upgrade` and to `backend.delete`."""

    success: bool
    error: str = ""
    stopped_process_keys: tuple[str, ...] = ()
    reports_stopped_processes: bool = False
    # Additive.
    outcome: Outcome | None = None


class BackendDeleteRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    backend: str
    # Additive.
    op_id: str = ""
    command: Command | None = None


class BackendListReply(Struct, frozen=True, omit_defaults=True, kw_only=True):
    backends: tuple[InstalledBackend, ...] | None  # Go sends null for none
    error: str = ""


class ModelsRunningReply(Struct, frozen=True, omit_defaults=True, kw_only=True):
    models: tuple[RunningReplica, ...] | None  # Go sends [] for none, and null with an error
    error: str = ""


class ModelStopRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    model_name: str
    process_key: str
    expected_address: str
    force: bool = False
    config_revision: str = ""
    # Additive.
    op_id: str = ""
    command: Command | None = None
    drain_seconds: float = 0.0


class ModelStopReply(Struct, frozen=True, omit_defaults=True, kw_only=True):
    matched: bool
    freed: bool
    terminated: bool
    process_key: str
    address: str = ""
    error: str = ""
    # Additive.
    outcome: Outcome | None = None


class ModelPullRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    model: Model
    op_id: str
    command: Command
    peers: tuple[FilePeer, ...] = ()  # nodes that may have the files; the source remains for what they do not have


class ModelPullReply(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The reply to `model.pull` and to `model.delete`."""

    success: bool
    error: str = ""
    outcome: Outcome | None = None


class ModelDeleteRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    model_name: str
    # Additive.
    op_id: str = ""
    command: Command | None = None


class ModelUnloadRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    model_name: str
    address: str = ""


class ModelUnloadReply(Struct, frozen=True, omit_defaults=True, kw_only=True):
    success: bool
    error: str = ""


class BackendStopRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Published without a reply. An empty name, `null` and an empty payload mean every process."""

    backend: str = ""
    force: bool = False


class CancelRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Published without a reply: stop this intent. If it is lost, the reply to the next heartbeat says the same."""

    intent: IntentId


class ProgressEvent(Struct, frozen=True, omit_defaults=True, kw_only=True):
    op_id: str
    node_id: NodeId
    backend: str
    file_name: str = ""
    current: str = ""
    total: str = ""
    percentage: float
    phase: str = ""
    # Additive.
    intent: IntentId = IntentId("")
    progress: Progress | None = None


def progress_event(op_id: str, node_id: NodeId, about: str, intent: IntentId, progress: Progress) -> ProgressEvent:
    return ProgressEvent(
        op_id=op_id,
        node_id=node_id,
        backend=about,
        file_name=progress.file,
        current=format_bytes(progress.done_bytes) if progress.done_bytes else "",
        total=format_bytes(progress.total_bytes) if progress.total_bytes else "",
        percentage=progress.percentage,
        phase=progress.phase,
        intent=intent,
        progress=progress,
    )


def progress_of(event: ProgressEvent) -> Progress:
    """Our own shape if the worker sent it, else the values of LocalAI's strings."""
    if event.progress is not None:
        return event.progress
    phase = event.phase if event.phase in ("resolving", "downloading", "extracting", "starting") else ""
    if event.file_name.startswith("Extracting "):
        phase = "extracting"  # LocalAI workers say `downloading` to the end
    return Progress(
        phase=phase,  # type: ignore[arg-type]  # narrowed by the line above
        file=event.file_name,
        done_bytes=parse_bytes(event.current),
        total_bytes=parse_bytes(event.total),
    )


class AnyReply(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The common fields of all replies; enough to settle an intent from any worker."""

    success: bool | None = None
    terminated: bool | None = None  # `model.stop`
    address: str = ""
    error: str = ""
    stopped_process_keys: tuple[str, ...] = ()
    outcome: Outcome | None = None


def outcome_of(reply: AnyReply) -> Outcome:
    """A Go worker replies with true or false and a text. It does not mark permanent failures, so all may be retried."""
    if reply.outcome is not None:
        return reply.outcome
    if reply.success or reply.terminated:
        return Outcome(address=reply.address, stopped=reply.stopped_process_keys)
    return Outcome(code="upstream_error", message=reply.error or "the worker gave no reason", can_heal=True)


# Coding ------------------------------------------------------------------------------------------

T = TypeVar("T")


def encode(message: Struct) -> bytes:
    return msgspec.json.encode(message)


def decode(payload: bytes, kind: type[T], what: str, *, limit_bytes: int = MAX_MESSAGE_BYTES) -> T:
    """Decode `payload` as `kind`; `Malformed` names the message and the field."""
    if len(payload) > limit_bytes:
        raise Malformed(f"cannot read {what}: {len(payload)} bytes, at most {limit_bytes} are allowed")
    try:
        return read_json(payload, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"cannot read {what}: {error}", code="invalid_json") from error
