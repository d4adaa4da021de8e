"""Where prompts and keys may be sent: nothing that a worker says about it is believed."""

from __future__ import annotations

import pytest

from enginehouse.core.address import Endpoint, parse_endpoint, replica_refusal
from enginehouse.core.errors import Invalid

TAKEN = frozenset({Endpoint("10.0.0.5", 50060), Endpoint("10.0.0.1", 4222), Endpoint("10.0.0.1", 50070)})


@pytest.mark.parametrize(
    ("address", "node"),
    [
        ("10.0.0.5:50051", "10.0.0.5:50051"),
        ("10.0.0.5:51050", "10.0.0.5:50051"),
        ("[::ffff:10.0.0.5]:50052", "10.0.0.5:50051"),
        ("[FD00::1]:50052", "[fd00:0::1]:50051"),
        ("Worker.lan:50052", "worker.lan:50051"),
        ("10.0.0.5:50070", "10.0.0.5:50051"),
    ],
)
def test_a_replica_listens_on_its_nodes_host_within_its_ports(address: str, node: str) -> None:
    assert replica_refusal(address, node, TAKEN) == ""


@pytest.mark.parametrize(
    ("address", "node"),
    [
        ("127.0.0.1:50051", "10.0.0.5:50051"),
        ("10.0.0.1:50051", "10.0.0.5:50051"),
        ("10.0.0.5:50050", "10.0.0.5:50051"),
        ("10.0.0.5:51051", "10.0.0.5:50051"),
        ("10.0.0.5:50060", "10.0.0.5:50051"),
        ("worker.lan:50060", "worker.lan:50051"),
        ("10.0.0.1:4222", "10.0.0.1:4000"),
        ("169.254.169.254:80", "10.0.0.5:50051"),
        ("10.0.0.5", "10.0.0.5:50051"),
        ("", "10.0.0.5:50051"),
        ("10.0.0.5:50051", ""),
        ("10.0.0.5:0", "10.0.0.5:50051"),
        ("10.0.0.5:99999999999999999999", "10.0.0.5:50051"),
    ],
)
def test_any_other_address_is_refused(address: str, node: str) -> None:
    assert replica_refusal(address, node, TAKEN)


@pytest.mark.parametrize("address", ["", ":1", "h:", "h:x", "h:-1", "h:0", "h:65536", "h"])
def test_what_is_no_address_is_told(address: str) -> None:
    with pytest.raises(Invalid):
        parse_endpoint(address)
