"""Views of nodes: lists, filtered and cut by the database, and one node.

Reads only. Views are rendered in the thread that reads them: a thousand of them would keep everything else waiting.
"""

from __future__ import annotations

from enginehouse.core.errors import NotFound
from enginehouse.core.name import shown
from enginehouse.core.node import NodeQuery
from enginehouse.core.views import NodeView
from enginehouse.frontend.fleet.nodes import find_node
from enginehouse.frontend.watching.views import render_node
from enginehouse.store import db, nodes
from enginehouse.store.db import Connection, Store


class NodeViews:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def every(self, asked: NodeQuery) -> list[NodeView]:
        """Return the nodes that are asked for, by name."""

        def work(connection: Connection) -> list[NodeView]:
            now = db.now(connection)
            found = nodes.listed(connection, asked)
            if found is None:
                raise NotFound(f"cannot list nodes after {shown(asked.after)}: there is no such node", param="after")
            return [render_node(node, now) for node in found]

        return await self._store.read(work)

    async def one(self, name_or_id: str) -> NodeView:
        def work(connection: Connection) -> NodeView:
            return render_node(find_node(connection, name_or_id), db.now(connection))

        return await self._store.read(work)
