"""Machines that an operator does not want as nodes.

The key of a machine is its identity, so a rejected one is refused under every name until that is taken back. One of
LocalAI's workers has no key: it is only removed, and its join token has to be revoked.
"""

from __future__ import annotations

import logging

from enginehouse.core.errors import Conflict, NotFound
from enginehouse.core.fingerprint import fingerprint_of, is_fingerprint_of
from enginehouse.core.ids import NodeId
from enginehouse.core.name import shown
from enginehouse.core.node import Node
from enginehouse.frontend.fleet.nodes import find_node
from enginehouse.frontend.watching.board import Board
from enginehouse.store import db, gone_nodes, nodes
from enginehouse.store.db import Connection, Store
from enginehouse.store.gone_nodes import RejectedKey

log = logging.getLogger(__name__)


class Rejections:
    def __init__(self, store: Store, board: Board) -> None:
        self._store = store
        self._board = board

    async def reject(self, name_or_id: str, by: str) -> Node:
        """Remove a node that waits for approval, and refuse its key from now on."""

        def work(connection: Connection) -> Node:
            node, now = find_node(connection, name_or_id, pending=True), db.now(connection)
            if node.approved:
                raise Conflict(
                    f"cannot reject {node.name}: it is approved; remove it with `enginehouse nodes remove`",
                    code="conflict",
                )
            if node.public_key:
                gone_nodes.reject(connection, node.public_key, node.name, now)
            gone_nodes.note_removed(connection, node.id, node.name, now)
            nodes.remove(connection, node.id)
            return node

        node = await self._store.transaction(work)
        log.info("node.rejected node=%s name=%s by=%s", node.id, node.name, by)
        self._board.node_removed(NodeId(node.id))
        return node

    async def every(self) -> list[RejectedKey]:
        return await self._store.read(gone_nodes.rejected)

    async def take_back(self, name: str, by: str) -> RejectedKey:
        """Let a rejected machine register again; `name` may also be its key or the fingerprint of it."""

        def work(connection: Connection) -> RejectedKey:
            every = gone_nodes.rejected(connection)
            found = [one for one in every if name == one.name or is_fingerprint_of(name, one.public_key)]
            if not found:
                raise NotFound(f"cannot find a rejected node named {shown(name)}", code="not_found", param="node")
            if len(found) > 1:
                keys = ", ".join(fingerprint_of(one.public_key) for one in found)
                raise Conflict(f"cannot choose a rejected node named {shown(name)}: use one of the fingerprints {keys}")
            gone_nodes.forgive(connection, found[0].public_key)
            return found[0]

        found = await self._store.transaction(work)
        log.info("node.rejection_taken_back name=%s by=%s", found.name, by)
        return found
