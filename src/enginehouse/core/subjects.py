"""The subjects of the bus: LocalAI's, and ours beside them. `wire` shows them together with the payloads.

Identifiers in subjects are ids of ours, which contain nothing that a token must not hold.
"""

from __future__ import annotations

from msgspec import Struct

from enginehouse.core.errors import Malformed

INBOX = "_INBOX.eh"  # LocalAI's permissions allow `_INBOX.>`, so a reply subject of our own still starts with it
MAX_TOKEN = 255  # ids are far shorter; a server ends the connection over a subject of thousands of characters
_RESERVED = str.maketrans(dict.fromkeys(".*> \t\n", "-"))


def token(value: str) -> str:
    """One token of a subject, as LocalAI sanitises it. Lossy, so only ids that contain none of these are ever used as
    keys.
    """
    return value.translate(_RESERVED)


def can_be_token(value: str) -> bool:
    """Whether the bus takes `token(value)`. LocalAI leaves in what the protocol cannot carry, such as a carriage
    return.
    """
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
# What a worker listens to; a missing one of the first four makes a Go frontend call the node unhealthy.
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


def node_subject(node_id: str, verb: str) -> str:
    return f"nodes.{token(node_id)}.{verb}"


def progress_subject(node_id: str, op_id: str) -> str:
    return f"nodes.{token(node_id)}.backend.install.{token(op_id)}.progress"


ALL_PROGRESS = "nodes.*.backend.install.*.progress"
ALL_REPLIES = f"{INBOX}.>"


FORCED = "forced"


class ReplySubject(Struct, frozen=True):
    """Whom an answer is for, and whose it is: only that node's credential can publish there. `is_forced` where an
    upgrade went out again as an install, for a worker that knows no upgrades: only the subject tells the two silences
    apart.
    """

    node_id: str
    intent_id: str
    attempt: int
    is_forced: bool = False


def reply_subject(node_id: str, intent_id: str, attempt: int, *, is_forced: bool = False) -> str:
    return f"{INBOX}.{token(node_id)}.{token(intent_id)}.{attempt}" + (f".{FORCED}" if is_forced else "")


def parse_reply_subject(subject: str) -> ReplySubject:
    parts = subject.split(".")
    is_forced = len(parts) == 6 and parts[5] == FORCED
    # Nine digits: Python refuses to read numbers of thousands, and not as an error of ours.
    if (len(parts) != 5 and not is_forced) or not parts[4].isdecimal() or len(parts[4]) > 9:
        raise Malformed(f"cannot read the reply subject {subject!r}", code="invalid_json")
    return ReplySubject(parts[2], parts[3], int(parts[4]), is_forced)


POLLS = "_INBOX.eh-poll"  # answers to questions that one frontend asks for itself


class PollSubject(Struct, frozen=True):
    """Which question an answer is for, and which node gives it."""

    node_id: str
    verb: str  # as one token
    number: int


def poll_subject(node_id: str, frontend: str, verb: str, number: int) -> str:
    """Where the answer to one `backend.list` or `models.running` goes."""
    return f"{POLLS}.{token(node_id)}.{token(frontend)}.{token(verb)}.{number}"


def parse_poll_subject(subject: str) -> PollSubject:
    parts = subject.split(".")
    if len(parts) != 6 or not parts[5].isdecimal() or len(parts[5]) > 9:
        raise Malformed(f"cannot read the subject of an answer {subject!r}", code="invalid_json")
    return PollSubject(parts[2], parts[4], int(parts[5]))


def all_polls(frontend: str) -> str:
    return f"{POLLS}.*.{token(frontend)}.>"


# Who may use which of them -----------------------------------------------------------------------


class Permissions(Struct, frozen=True, kw_only=True):
    """Allow lists of one credential; what is not listed is denied."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False  # also what it was asked under another reply subject, once


def worker_permissions(node_id: str) -> Permissions:
    """A worker hears its own commands, and publishes its own progress and its own answers."""
    own = token(node_id)
    return Permissions(
        subscribe=(node_subject(node_id, ">"),),
        publish=(
            # The op id is one token of the subject; `token` would turn the wildcard into a dash.
            progress_subject(node_id, "OP").replace("OP", "*"),
            node_subject(node_id, "files.>"),  # LocalAI's
            f"{INBOX}.{own}.>",
            f"{POLLS}.{own}.>",
        ),
        answers=True,
    )


def frontend_permissions() -> Permissions:
    """A frontend commands every node and hears progress and answers; it never answers a command itself."""
    return Permissions(
        publish=tuple(f"nodes.*.{verb}" for verb in WORKER_SUBJECTS),
        subscribe=(ALL_PROGRESS, ALL_REPLIES, f"{POLLS}.>"),
    )
