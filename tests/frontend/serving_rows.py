"""Rows of nodes, models and replicas by number, for stores that are filled without any worker."""

from __future__ import annotations

import msgspec
from tests.frontend.world import MODEL

from enginehouse.core.capacity import Capacity
from enginehouse.core.ids import NodeId
from enginehouse.core.model import Model
from enginehouse.core.node import Node
from enginehouse.core.replica import Replica, RunningReplica
from enginehouse.core.report import Report

GIB = 1024**3
REPLICAS_PER_NODE = 10


def a_model(number: int) -> Model:
    return msgspec.structs.replace(MODEL, name=f"model-{number:04d}", backend="engine", config={"memory": 4 * GIB})


def a_node(number: int, running: list[Replica], now: float) -> Node:
    shown = tuple(
        RunningReplica(
            model_id=one.model,
            replica_index=one.slot,
            address=one.address,
            nonce=one.nonce,
            generation=1,
            revision=one.revision,
            memory_bytes=4 * GIB,
        )
        for one in running
    )
    return Node(
        id=NodeId(f"{number:036d}"),
        name=f"node-{number:04d}",
        node_type="backend",
        public_key=f"{number:064d}",
        approved=True,
        health="healthy",
        drained=False,
        address="h:1",
        http_address="",
        capability="default",
        platform="linux/amd64",
        labels={"zone": f"z{number % 10}"},
        max_replicas_per_model=4,
        capacity=Capacity(available_ram=24 * GIB, total_ram=64 * GIB, available_disk=100 * GIB),
        created_at=now,
        updated_at=now,
        last_heartbeat=now,
        report=Report(boot_id=f"boot-{number}", sequence=1, mark=now, boot_mark=now, replicas=shown),
    )


def a_replica(number: int, model: Model, nonce: str = "") -> Replica:
    return Replica(
        node_id=NodeId(f"{number // REPLICAS_PER_NODE:036d}"),
        model=model.name,
        slot=0,
        revision=model.revision,
        address=f"h:{10_000 + number}",
        nonce=nonce or f"{number:016x}",
        backend="engine",
        key=f"{number:032x}",
    )
