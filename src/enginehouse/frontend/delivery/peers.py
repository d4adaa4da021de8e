"""Which nodes a node may read the files of a pull from, with a ticket for each file.

Only healthy nodes of ours with an approved address are named. Tickets are made when a command is sent and are stored
nowhere. A node on loopback is named only to nodes that are on loopback themselves, because for others it would be their
own machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from enginehouse.core.action import PullModel, subject_of
from enginehouse.core.address import is_loopback, parse_endpoint
from enginehouse.core.errors import Invalid
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.intent import Intent
from enginehouse.core.node import Node
from enginehouse.core.peer import FilePeer, choose_peers
from enginehouse.core.ticket import for_file, make_ticket
from enginehouse.frontend.fleet.node_http import refusal_of
from enginehouse.frontend.fleet.nodes import AddressRules
from enginehouse.store import db, nodes
from enginehouse.store import intents as store_intents
from enginehouse.store.db import Connection


def peers_of(
    connection: Connection, claimed: Sequence[Intent], addresses: AddressRules
) -> dict[IntentId, tuple[FilePeer, ...]]:
    """The peers for each claimed pull. The order of `claimed` is the order of sending."""
    pulls = [intent for intent in claimed if isinstance(intent.action, PullModel)]
    if not pulls:
        return {}
    every = {node.id: node for node in nodes.every(connection)}
    able = [node for node in every.values() if _may_serve(node, addresses)]
    if not able:
        return {}
    now = db.now(connection)
    keys = {token.node_id: token.hash for token in nodes.tokens(connection)}
    found: dict[IntentId, tuple[FilePeer, ...]] = {}
    for number, intent in enumerate(pulls):
        assert isinstance(intent.action, PullModel), "filtered above"
        later = {one.id for one in pulls[number:]}
        own = every.get(intent.node_id)
        reachable = [node for node in able if own is not None and _is_reachable(node, own)]
        fetching = _fetching(connection, reachable, intent.action, later)
        chosen = choose_peers(intent.action.model, intent.node_id, reachable, fetching)
        found[intent.id] = tuple(
            FilePeer(
                one.sha256,
                every[one.node_id].http_address,
                make_ticket(keys[one.node_id], for_file(one.sha256), now),
            )
            for one in chosen
            if keys.get(one.node_id)
        )
    return found


def _fetching(
    connection: Connection, able: Sequence[Node], action: PullModel, later: set[IntentId]
) -> dict[NodeId, set[str]]:
    """The digests that nodes were told to fetch for the same model, oldest first, without commands sent later: two
    nodes must not wait for each other.
    """
    intents = [
        one
        for one in store_intents.changing(connection, able, [subject_of(action)])
        if one.id not in later and one.state in ("running", "succeeded")
    ]
    found: dict[NodeId, set[str]] = {}
    for one in sorted(intents, key=lambda intent: (intent.dispatched_at, intent.id)):
        if isinstance(one.action, PullModel):
            found.setdefault(one.node_id, set()).update(file.sha256 for file in one.action.model.files)
    return found


def _may_serve(node: Node, addresses: AddressRules) -> bool:
    return node.is_target and not node.is_localai and node.health == "healthy" and not refusal_of(node, addresses)


def _is_reachable(node: Node, own: Node) -> bool:
    try:
        return not is_loopback(parse_endpoint(node.http_address).host) or is_loopback(parse_endpoint(own.address).host)
    except Invalid:
        return False
