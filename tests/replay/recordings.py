"""LocalAI's recorded traffic as questions and answers, in the order in which they crossed the wire.

    for exchange in exchanges("04-install-both-nodes"):
        exchange.verb, exchange.request, exchange.progress, exchange.reply

Only reads. What a recording says is never changed here: whoever replays it fills in ids and addresses of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from msgspec import Struct, field
from tests.core.localai import SHARED

SAMPLES = SHARED / "data" / "localai-samples"
FIRST_NODE = "b694cbad-5859-4ec2-9831-26646e66d7ca"
SECOND_NODE = "9bd1e72c-40d9-4a74-8fa0-42715bf0abcd"
SECOND_NODE_LATER = "2e158739-260c-4d46-a46a-c72a5590e4c1"  # the same worker, removed and come back
GALLERY_URL = "http://127.0.0.1:15080/index.yaml"
REGISTRY = "registry.example"
OLD_DIGEST = "sha256:bb2a7541eabb9ad689bab691b55c756f69aedbd15db0c8adb8f2260db0e57d1f"
NEW_DIGEST = "sha256:f813d553f1da20fef5cfee27771cfa3d0abb7b3a636a874af45c18df2cdfe8ff"
NO_RESPONDERS = 503

Payload = dict[str, Any]


class Exchange(Struct, kw_only=True):
    """One request of a frontend to a worker, and what came back for it."""

    node_id: str
    verb: str
    request: Payload
    at: float
    reply: Payload | None = None  # None where nobody listened, or nothing was recorded
    is_unheard: bool = False
    took: float = 0.0
    progress: list[tuple[float, Payload]] = field(default_factory=list)  # seconds after the request, and the event


def needs_recordings(function: Any) -> Any:
    """Absent in a user's checkout; in continuous integration they must be there."""
    missing = not SAMPLES.is_dir() and not os.environ.get("CI")
    return pytest.mark.skipif(missing, reason="a user's checkout has no recordings")(function)


@cache
def entries(name: str) -> list[Payload]:
    """Everything that one recording holds."""
    found: list[Payload] = json.loads((SAMPLES / f"{name}.json").read_text())
    return found


def exchanges(name: str, *verbs: str, node_id: str = "") -> list[Exchange]:
    """What frontends asked of workers, with answers and progress; only these verbs and this node where they are
    named.
    """
    found = list(_paired(entries(name)))
    return [one for one in found if (not verbs or one.verb in verbs) and (not node_id or one.node_id == node_id)]


def _paired(recorded: list[Payload]) -> Iterator[Exchange]:
    open_ones: list[Exchange] = []
    made: list[Exchange] = []
    for entry in recorded:
        subject = str(entry.get("subject", ""))
        about = str(entry.get("reply_for") or subject).split(".")
        if entry["transport"] != "nats" or about[0] != "nodes" or "op" in entry:
            continue
        node_id, verb = about[1], ".".join(about[2:])
        if entry.get("reply_for"):
            asked = next((one for one in open_ones if (one.node_id, one.verb) == (node_id, verb)), None)
            if asked is not None:
                open_ones.remove(asked)
                asked.is_unheard = entry.get("status") == NO_RESPONDERS
                asked.reply = None if asked.is_unheard else entry["payload"]
                asked.took = entry["t"] - asked.at
        elif subject.endswith(".progress"):
            for one in made:
                if one.node_id == node_id and one.request.get("op_id") == entry["payload"]["op_id"]:
                    one.progress.append((entry["t"] - one.at, entry["payload"]))
        elif entry.get("reply_to"):
            exchange = Exchange(node_id=node_id, verb=verb, request=entry["payload"], at=entry["t"])
            open_ones.append(exchange)
            made.append(exchange)
    yield from made


def listing(name: str, node_id: str, number: int = 0) -> Payload:
    """What a worker said it has: the first time in this recording, or a later one."""
    found = [one.reply for one in exchanges(name, "backend.list", node_id=node_id) if one.reply is not None]
    return found[number]


def calls(name: str, path: str) -> list[Payload]:
    """The HTTP exchanges of a recording whose path is this one."""
    return [entry for entry in entries(name) if entry["transport"] == "http" and entry["path"] == path]


def registration(worker: str) -> Payload:
    """The body with which this worker registered."""
    for call in calls("01-registration-heartbeat", "/api/node/register"):
        if call["payload"]["name"] == worker:
            body: Payload = call["payload"]
            return body
    raise AssertionError(f"{worker} never registered")


def subscriptions(worker: str) -> list[str]:
    """The verbs that this worker listens to, in its order."""
    recorded = entries("01-registration-heartbeat")
    found = [entry for entry in recorded if entry.get("op") == "SUB" and entry["from"] == worker]
    return [entry["subject"].split(".", 2)[2] for entry in found]


def filled_in(value: Any, replacements: dict[str, str]) -> Any:
    """`value` with ids and addresses of the replay in place of the recorded ones, wherever they stand."""
    text = json.dumps(value)
    for recorded, own in replacements.items():
        text = text.replace(recorded, own)
    return json.loads(text)
