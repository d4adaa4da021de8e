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
    """Whom an answer is for. `is_forced` where an upgrade went out again as an install, for a worker that knows no
    upgrades: only the subject tells the two silences apart.
    """

    intent_id: str
    attempt: int
    is_forced: bool = False


def reply_subject(intent_id: str, attempt: int, *, is_forced: bool = False) -> str:
    return f"{INBOX}.{token(intent_id)}.{attempt}" + (f".{FORCED}" if is_forced else "")


def parse_reply_subject(subject: str) -> ReplySubject:
    parts = subject.split(".")
    is_forced = len(parts) == 5 and parts[4] == FORCED
    # Nine digits: Python refuses to read numbers of thousands, and not as an error of ours.
    if (len(parts) != 4 and not is_forced) or not parts[3].isdecimal() or len(parts[3]) > 9:
        raise Malformed(f"cannot read the reply subject {subject!r}", code="invalid_json")
    return ReplySubject(parts[2], int(parts[3]), is_forced)


POLLS = "_INBOX.eh-poll"  # answers to questions that one frontend asks for itself


def poll_subject(frontend: str, verb: str, node_id: str, number: int) -> str:
    """Where the answer to one `backend.list` or `models.running` goes."""
    return f"{POLLS}.{token(frontend)}.{token(verb)}.{token(node_id)}.{number}"


def all_polls(frontend: str) -> str:
    return f"{POLLS}.{token(frontend)}.>"
