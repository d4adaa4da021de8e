"""Subjects of the bus, LocalAI's and ours, and the permissions for them. `wire` has the payloads.

Identifiers in subjects are our own ids, which contain no reserved character.
"""

from __future__ import annotations

from msgspec import Struct

from enginehouse.core.errors import Malformed
from enginehouse.core.ids import IntentId, NodeId

INBOX = "_INBOX.eh"  # LocalAI's permissions allow `_INBOX.>`, so our reply subjects start with it
MAX_TOKEN = 255  # ids are far shorter; a server closes the connection over a subject of thousands of characters
_RESERVED = str.maketrans(dict.fromkeys(".*> \t\n", "-"))


def token(value: str) -> str:
    """One token of a subject, sanitised as LocalAI does; lossy, so keys are ids without reserved characters."""
    return value.translate(_RESERVED)


def can_be_token(value: str) -> bool:
    """Whether the bus accepts `token(value)`: LocalAI keeps characters that the protocol cannot carry."""
    return 0 < len(value) <= MAX_TOKEN and token(value).isprintable()


# Subjects ----------------------------------------------------------------------------------------

INSTALL = "backend.install"
UPGRADE = "backend.upgrade"
DELETE = "backend.delete"
LIST = "backend.list"
RUNNING = "models.running"
STOP_MODEL = "model.stop"
STOP = "backend.stop"
UNLOAD = "model.unload"
DELETE_MODEL = "model.delete"
STOP_NODE = "stop"
PULL_MODEL = "model.pull"  # ours
CANCEL = "command.cancel"  # ours
# Subjects of a worker. If one of the first four is missing, a Go frontend marks the node unhealthy.
WORKER_SUBJECTS = (
    INSTALL,
    UPGRADE,
    DELETE,
    LIST,
    RUNNING,
    STOP_MODEL,
    STOP,
    UNLOAD,
    DELETE_MODEL,
    STOP_NODE,
    PULL_MODEL,
    CANCEL,
)


def node_subject(node_id: NodeId, verb: str) -> str:
    return f"nodes.{token(node_id)}.{verb}"


def progress_subject(node_id: NodeId, op_id: str) -> str:
    return f"nodes.{token(node_id)}.backend.install.{token(op_id)}.progress"


ALL_PROGRESS = "nodes.*.backend.install.*.progress"
ALL_REPLIES = f"{INBOX}.>"


FORCED = "forced"


class ReplySubject(Struct, frozen=True):
    """The intent that a reply is for, and the node it comes from: only that node's credential may publish there.

    `is_forced` marks an upgrade that was resent as a forced install for a worker without upgrades: only the subject
    distinguishes the two when there are no responders.
    """

    node_id: NodeId
    intent_id: IntentId
    attempt: int
    is_forced: bool = False


def reply_subject(node_id: NodeId, intent_id: IntentId, attempt: int, *, is_forced: bool = False) -> str:
    return f"{INBOX}.{token(node_id)}.{token(intent_id)}.{attempt}" + (f".{FORCED}" if is_forced else "")


def parse_reply_subject(subject: str) -> ReplySubject:
    parts = subject.split(".")
    is_forced = len(parts) == 6 and parts[5] == FORCED
    # Nine digits: `int` refuses numbers of thousands of digits with an error that is not ours.
    if (len(parts) != 5 and not is_forced) or not parts[4].isdecimal() or len(parts[4]) > 9:
        raise Malformed(f"cannot read the reply subject {subject!r}: it is malformed", code="invalid_json")
    return ReplySubject(NodeId(parts[2]), IntentId(parts[3]), int(parts[4]), is_forced)


POLLS = "_INBOX.eh-poll"  # replies to the polls of one frontend


class PollSubject(Struct, frozen=True):
    """The poll that a reply is for, and the node it comes from."""

    node_id: NodeId
    verb: str  # as one token
    number: int


def poll_subject(node_id: NodeId, frontend: str, verb: str, number: int) -> str:
    """The reply subject of one `backend.list` or `models.running` poll."""
    return f"{POLLS}.{token(node_id)}.{token(frontend)}.{token(verb)}.{number}"


def parse_poll_subject(subject: str) -> PollSubject:
    parts = subject.split(".")
    if len(parts) != 6 or not parts[5].isdecimal() or len(parts[5]) > 9:
        raise Malformed(f"cannot read the poll subject {subject!r}: it is malformed", code="invalid_json")
    return PollSubject(NodeId(parts[2]), parts[4], int(parts[5]))


def all_polls(frontend: str) -> str:
    return f"{POLLS}.*.{token(frontend)}.>"


ALL_IN_FLIGHT = "frontends.*.in_flight"


def in_flight_subject(owner: str) -> str:
    """Ours: the requests in flight on one frontend, for the others."""
    return f"frontends.{token(owner)}.in_flight"


ALL_CHANGED = "frontends.*.changed"


def changed_subject(owner: str) -> str:
    """Ours: one frontend has changed rows, and the others look at what they show."""
    return f"frontends.{token(owner)}.changed"


# Permissions -------------------------------------------------------------------------------------


class Permissions(Struct, frozen=True, kw_only=True):
    """Allow lists of one credential; everything else is denied."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False  # may also publish one reply to each request it received


def worker_permissions(node_id: NodeId) -> Permissions:
    """A worker subscribes to its own commands and publishes its own progress and replies."""
    own = token(node_id)
    return Permissions(
        subscribe=(node_subject(node_id, ">"),),
        publish=(
            # The op id is one token of the subject; `token` would replace the wildcard by a dash.
            progress_subject(node_id, "OP").replace("OP", "*"),
            node_subject(node_id, "files.>"),  # LocalAI's
            f"{INBOX}.{own}.>",
            f"{POLLS}.{own}.>",
        ),
        answers=True,
    )


def frontend_permissions() -> Permissions:
    """A frontend publishes commands to every node and subscribes to progress and replies; it never replies itself."""
    return Permissions(
        # Progress, too: of commands that a frontend carries out for one of LocalAI's workers.
        publish=(*(f"nodes.*.{verb}" for verb in WORKER_SUBJECTS), ALL_PROGRESS, ALL_IN_FLIGHT, ALL_CHANGED),
        subscribe=(ALL_PROGRESS, ALL_REPLIES, f"{POLLS}.>", ALL_IN_FLIGHT, ALL_CHANGED),
    )
