"""Which reported process is that of a replica: by its nonce, or by model, slot and port where there is none."""

from __future__ import annotations

import pytest

from enginehouse.core.ids import NodeId
from enginehouse.core.replica import Replica, RunningReplica, is_process

REPLICA = Replica(
    node_id=NodeId("n"), model="m", slot=1, revision="r", address="10.0.0.5:50052", nonce="own", backend="b"
)


@pytest.mark.parametrize(
    ("model", "slot", "address", "nonce", "is_same"),
    [
        ("m", 1, "10.0.0.5:50052", "own", True),
        ("m", 1, "10.0.0.5:50052", "another", False),
        ("m", 1, "127.0.0.1:50052", "", True),
        ("m", 1, "", "", True),
        ("m", 1, "127.0.0.1:50053", "", False),
        ("m", 0, "127.0.0.1:50052", "", False),
        ("other", 1, "127.0.0.1:50052", "", False),
    ],
)
def test_a_process_is_known_by_its_nonce_or_by_model_slot_and_port(
    model: str, slot: int, address: str, nonce: str, is_same: bool
) -> None:
    running = RunningReplica(model_id=model, replica_index=slot, address=address, nonce=nonce)
    assert is_process(running, REPLICA) is is_same
