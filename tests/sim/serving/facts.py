"""What is stored about serving, read past the product's code: nodes, replicas, schedules, what operators keep.

Read at the moment of a commit or in the calm at the end. It decides nothing.
"""

from __future__ import annotations

import json
import sqlite3

from msgspec import Struct
from tests.sim.rows import select_rows


class NodeFact(Struct, frozen=True):
    id: str
    name: str
    is_serving: bool  # its replicas get requests
    is_schedulable: bool  # it may get more of them
    labels: dict[str, str]


class ReplicaFact(Struct, frozen=True):
    node_id: str
    model: str
    slot: int
    nonce: str
    is_leaving: bool


class ScheduleFact(Struct, frozen=True):
    least: int = 0
    most: int = 0
    spread: bool = False
    selector: dict[str, str] = {}
    is_there: bool = False
    idle_seconds: float = 0.0


class ModelFact(Struct, frozen=True, kw_only=True):
    """One model at one moment: what is wanted of it, and its replicas."""

    name: str
    schedule: ScheduleFact
    kept: tuple[str, ...]
    reason: str
    nodes: tuple[NodeFact, ...]
    replicas: tuple[ReplicaFact, ...]

    @property
    def matching(self) -> list[NodeFact]:
        """Where more of it may go."""
        return [node for node in self.nodes if node.is_schedulable and self.is_selected(node)]

    def is_selected(self, node: NodeFact) -> bool:
        return self.schedule.selector.items() <= node.labels.items()

    @property
    def serving(self) -> list[ReplicaFact]:
        """Those that get requests."""
        serving = {node.id for node in self.nodes if node.is_serving}
        return [one for one in self.replicas if not one.is_leaving and one.node_id in serving]

    @property
    def belonging(self) -> list[ReplicaFact]:
        """Those that get requests and are where they should be."""
        selected = {node.id for node in self.nodes if self.is_selected(node)}
        return [one for one in self.serving if one.node_id in selected]

    @property
    def least(self) -> int:
        """So many must stay, whoever else needs room."""
        if self.schedule.spread:
            return len(self.matching)
        return max(self.schedule.least, len(self.kept))

    @property
    def most(self) -> int:
        """More than so many are never wanted without load."""
        if self.schedule.spread:
            return len(self.matching)
        # One that may be anywhere is served by one that was asked for on a node.
        return max(self.schedule.least, len([one for one in self.kept if one]), 1 if self.kept else 0)


def read_nodes(connection: sqlite3.Connection) -> tuple[NodeFact, ...]:
    rows = select_rows(connection, "select id, name, approved, health, drained, labels from nodes order by name")
    found: list[NodeFact] = []
    for node_id, name, approved, health, drained, labels in rows:
        is_open = bool(approved) and not drained
        found.append(
            NodeFact(
                str(node_id),
                str(name),
                is_open and health != "offline",
                is_open and health == "healthy",
                json.loads(str(labels)),
            )
        )
    return tuple(found)


def read_replicas(connection: sqlite3.Connection) -> tuple[ReplicaFact, ...]:
    query = "select node_id, model, slot, nonce, leaving from replicas order by model, node_id, slot"
    rows = select_rows(connection, query)
    return tuple(
        ReplicaFact(str(node_id), str(model), int(str(slot)), str(nonce), bool(leaving))
        for node_id, model, slot, nonce, leaving in rows
    )


def read_model(connection: sqlite3.Connection, name: str) -> ModelFact:
    columns = "min_replicas, max_replicas, spread_all, node_selector, idle_seconds"
    schedules = select_rows(connection, f"select {columns} from schedules where model_name = ?", (name,))
    infos = select_rows(connection, "select kept, reason from load_infos where model = ?", (name,))
    schedule = ScheduleFact()
    for least, most, spread, selector, idle in schedules:
        schedule = ScheduleFact(
            int(str(least)), int(str(most)), bool(spread), json.loads(str(selector)), True, float(str(idle))
        )
    return ModelFact(
        name=name,
        schedule=schedule,
        kept=tuple(json.loads(str(infos[0][0]))) if infos else (),
        reason=str(infos[0][1]) if infos else "",
        nodes=read_nodes(connection),
        replicas=tuple(one for one in read_replicas(connection) if one.model == name),
    )


def model_names(connection: sqlite3.Connection) -> list[str]:
    return [str(name) for (name,) in select_rows(connection, "select name from models order by name")]
