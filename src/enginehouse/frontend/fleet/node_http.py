"""Where the HTTP server of a node is, and with which tickets a frontend may ask it.

The address is what the worker claimed, so it is used only on the approved host of the node, and never where the store,
the bus or a frontend listens. A ticket is made from the hash of the node's token; after a rotation the worker may still
have the one before, so there may be two.
"""

from __future__ import annotations

from msgspec import Struct

from enginehouse.core.address import parse_endpoint, taken_by
from enginehouse.core.errors import Invalid, Unavailable
from enginehouse.core.node import Node
from enginehouse.core.ticket import LOGS, make_ticket
from enginehouse.frontend.fleet.nodes import AddressRules, find_node
from enginehouse.store import db, nodes
from enginehouse.store.db import Connection, Store


class NodeDoor(Struct, frozen=True):
    name: str
    address: str
    tickets: tuple[str, ...]


class NodeDoors:
    def __init__(self, store: Store, addresses: AddressRules) -> None:
        self._store = store
        self._addresses = addresses

    async def for_logs(self, name_or_id: str, purpose: str = LOGS) -> NodeDoor:
        """How to ask a node for its logs, of its engines or of the worker itself. Raises `NotFound`, or `Unavailable`
        if the node serves none.
        """

        def work(connection: Connection) -> NodeDoor:
            node, now = find_node(connection, name_or_id), db.now(connection)
            why = refusal_of(node, self._addresses)
            if why:
                raise Unavailable(f"cannot read logs of {node.name}: {why}", code="node_unreachable")
            known = nodes.token_of(connection, node.id)
            keys = [key for key in (known.hash, known.previous) if key] if known is not None else []
            return NodeDoor(node.name, node.http_address, tuple(make_ticket(key, purpose, now) for key in keys))

        return await self._store.read(work)


def refusal_of(node: Node, addresses: AddressRules) -> str:
    """Why the HTTP server of a node must not be asked; "" if it may."""
    if not node.approved or not node.http_address:
        return "it is not approved, or its worker serves no HTTP; upgrade the worker"
    try:
        claimed, approved = parse_endpoint(node.http_address), parse_endpoint(node.address)
    except Invalid as error:
        return error.message
    if claimed.host != approved.host:
        return f"its HTTP address is not on {approved.host}, the approved address of the node"
    if taken_by(claimed, addresses.taken):
        return "the store, the bus or a frontend listens at its HTTP address"
    return ""
