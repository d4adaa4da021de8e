"""Labels of nodes, as operators set them. Selectors of schedules compare them.

A worker brings labels of its own when it registers; those that operators set stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from enginehouse.core.errors import NotFound
from enginehouse.core.ids import NodeId
from enginehouse.frontend.fleet.nodes import Nodes, find_node
from enginehouse.frontend.fleet.registration import check_labels
from enginehouse.store import db, nodes
from enginehouse.store.db import Connection, Store


class NodeLabels:
    def __init__(self, store: Store, fleet: Nodes, wake: Callable[[], None]) -> None:
        self._store = store
        self._fleet = fleet
        self._wake = wake

    async def get(self, node: str) -> dict[str, str]:
        return await self._store.read(lambda connection: find_node(connection, node).labels)

    async def merge(self, node: str, labels: Mapping[str, str]) -> dict[str, str]:
        """Add or change labels."""
        return await self._change(node, lambda before: {**before, **labels})

    async def replace(self, node: str, labels: Mapping[str, str]) -> dict[str, str]:
        """Set the labels; those that say what the node is (`node.*`, `gpu.*`) stay."""
        return await self._change(
            node, lambda before: {**{key: value for key, value in before.items() if _is_own(key)}, **labels}
        )

    async def remove(self, node: str, key: str) -> None:
        def without(before: Mapping[str, str]) -> dict[str, str]:
            if key not in before:
                raise NotFound(f"cannot remove the label {key}: {node} does not have it", code="not_found", param="key")
            return {one: value for one, value in before.items() if one != key}

        await self._change(node, without)

    async def _change(self, node: str, change: Callable[[Mapping[str, str]], dict[str, str]]) -> dict[str, str]:
        def work(connection: Connection) -> tuple[NodeId, dict[str, str]]:
            found = find_node(connection, node)
            labels = change(found.labels)
            check_labels(f"cannot label {found.name}", labels)
            nodes.set_labels(connection, found.id, labels, db.now(connection))
            return found.id, labels

        node_id, labels = await self._store.transaction(work)
        await self._fleet.publish_changed([node_id])
        self._wake()
        return labels


def _is_own(key: str) -> bool:
    return key.startswith(("node.", "gpu."))
