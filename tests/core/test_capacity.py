"""One shape for the resources of a machine, whatever describes it."""

from __future__ import annotations

import msgspec

from enginehouse.core.capacity import AMOUNTS, Capacity, capacity_of
from enginehouse.core.ids import NodeId
from enginehouse.core.node_api import HeartbeatRequest, RegisterRequest
from enginehouse.core.views import NodeView

NO_RESOURCES = {"report", "report_digest", "unchanged", "renew", "bus"}


def test_a_registration_gives_its_resources_alone() -> None:
    request = RegisterRequest(name="attic", cores=4, total_ram=2**34, gpu_vendor="nvidia")
    found = capacity_of(request)
    assert type(found) is Capacity
    assert found == Capacity(cores=4, total_ram=2**34, gpu_vendor="nvidia")


def test_a_heartbeat_changes_only_resources_that_a_capacity_has() -> None:
    changed = set(HeartbeatRequest.__struct_fields__) - NO_RESOURCES
    assert changed
    assert changed <= {*AMOUNTS, "used_cores", "gpu_vendor", "gpu_cards"}


def test_a_view_sends_every_resource_although_a_row_leaves_out_what_is_unknown() -> None:
    assert msgspec.to_builtins(Capacity()) == {}
    sent = msgspec.to_builtins(NodeView(id=NodeId("n"), name="attic"))
    assert set(Capacity.__struct_fields__) <= sent.keys()
