"""Recorded LocalAI traffic: every message that we handle decodes, and what we encode has the same keys and values.

The recordings stand beside the repository in continuous integration and are absent in a user's checkout.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from enginehouse.core import node_api, subjects, wire

SAMPLES = Path(__file__).parents[3] / "shared" / "data" / "localai-samples"

BY_SUFFIX: dict[tuple[str, bool], type[msgspec.Struct]] = {
    (subjects.INSTALL, False): wire.BackendInstallRequest,
    (subjects.INSTALL, True): wire.BackendInstallReply,
    (subjects.UPGRADE, False): wire.BackendUpgradeRequest,
    (subjects.UPGRADE, True): wire.BackendUpgradeReply,
    (subjects.DELETE, False): wire.BackendDeleteRequest,
    (subjects.DELETE, True): wire.BackendUpgradeReply,
    (subjects.LIST, True): wire.BackendListReply,
    (subjects.RUNNING, True): wire.ModelsRunningReply,
    (subjects.STOP_MODEL, False): wire.ModelStopRequest,
    (subjects.STOP_MODEL, True): wire.ModelStopReply,
}


def test_the_recordings_are_there_in_continuous_integration() -> None:
    assert SAMPLES.is_dir() or not os.environ.get("CI"), f"{SAMPLES} is missing"


def recorded() -> list[tuple[str, type[msgspec.Struct], Any]]:
    found: list[tuple[str, type[msgspec.Struct], Any]] = []
    for path in sorted(SAMPLES.glob("*.json")):
        for number, entry in enumerate(json.loads(path.read_text())):
            kind = _kind(entry)
            if kind is not None:
                found.append((f"{path.stem}#{number}", kind, entry["payload"]))
    return found


def _kind(entry: dict[str, Any]) -> type[msgspec.Struct] | None:
    if entry["transport"] != "nats" or not isinstance(entry.get("payload"), dict):
        return None
    about = entry.get("reply_for") or entry.get("subject") or ""
    if about.endswith(".progress") and about.startswith("nodes."):
        return wire.ProgressEvent
    verb = ".".join(about.split(".")[2:])
    return BY_SUFFIX.get((verb, bool(entry.get("reply_for")))) if about.startswith("nodes.") else None


def needs_recordings(function: Any) -> Any:
    return pytest.mark.skipif(not SAMPLES.is_dir(), reason="a user's checkout has no recordings")(function)


@needs_recordings
def test_every_recorded_message_that_we_handle_survives_decoding_and_encoding() -> None:
    seen = set()
    for name, kind, payload in recorded():
        seen.add(kind)
        message = wire.decode(json.dumps(payload).encode(), kind, name)
        again = json.loads(wire.encode(message))
        assert again == payload, f"{name}: {kind.__name__} changed on the way"
    assert seen == {*BY_SUFFIX.values(), wire.ProgressEvent}, "a kind of message was never met"


@needs_recordings
def test_every_recorded_reply_settles_an_intent_one_way_or_the_other() -> None:
    settled = 0
    for name, kind, payload in recorded():
        if kind in (wire.BackendInstallReply, wire.BackendUpgradeReply, wire.ModelStopReply):
            outcome = wire.outcome_of(wire.decode(json.dumps(payload).encode(), wire.AnyReply, name))
            worked = payload.get("success", payload.get("terminated"))
            assert outcome.succeeded is worked, name
            assert outcome.succeeded or outcome.message, name
            settled += 1
    assert settled > 20


@needs_recordings
def test_recorded_registrations_and_heartbeats_decode_with_every_key_known() -> None:
    met = 0
    for path in sorted(SAMPLES.glob("*.json")):
        for number, entry in enumerate(json.loads(path.read_text())):
            route = entry.get("path", "")
            if entry["transport"] != "http" or not route.startswith("/api/node/") or entry.get("status", 500) >= 300:
                continue
            name = f"{path.stem}#{number}"
            if route.endswith("/register") and isinstance(entry.get("payload"), dict):
                _survives(entry["payload"], node_api.RegisterRequest, name)
                if "_note" not in entry["response"]:  # one answer was recorded compressed and is only described
                    _survives(entry["response"], node_api.RegisterReply, name)
                met += 1
            elif route.endswith("/heartbeat") and isinstance(entry.get("payload"), dict):
                _survives(entry["payload"], node_api.HeartbeatRequest, name)
                met += 1
    assert met > 10


def _survives(payload: dict[str, Any], kind: type[msgspec.Struct], name: str) -> None:
    message = wire.decode(json.dumps(payload).encode(), kind, name)
    again = json.loads(wire.encode(message))
    # A key that the peer sends although it is empty may be missing from ours; every value that says something stays.
    assert again == {key: value for key, value in payload.items() if key in again}, name
    assert all(not payload[key] for key in payload.keys() - again.keys()), name
