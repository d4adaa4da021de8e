"""Which node a registration is about, and whether what was approved still holds. Pure.

A machine with a key is that key. One without (LocalAI's workers) is the token it joined with, where that is a token for
one node; under a token that many share it is its address and the host it speaks from, so that somebody else with the
same token becomes another node, which waits for an approval of its own, and the first goes on working.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import sha256

from msgspec import Struct

from enginehouse.core.address import is_loopback as is_loopback_host
from enginehouse.core.address import is_within, parse_endpoint, plain_host
from enginehouse.core.errors import Conflict, Denied
from enginehouse.core.node import Node


class JoinOrigin(Struct, frozen=True):
    """Who brings a registration: the token it shows, the node that token is for (if for one), the host it speaks from.
    The default is this process itself.
    """

    token_id: str = ""
    only_node: str = ""
    host: str = ""

    @property
    def is_loopback(self) -> bool:
        return not self.host or is_loopback_host(self.host)


def claim_of(origin: JoinOrigin, address: str) -> str:
    """What a machine without a key is told from others of its name by."""
    if origin.only_node:
        return f"token:{origin.token_id}"
    # Loopback has two spellings; a worker that is restarted may use the other one.
    host = "loopback" if origin.is_loopback else plain_host(origin.host)
    return sha256(f"{address}\n{host}".encode()).hexdigest()


def may_speak_for(origin: JoinOrigin, node: Node) -> bool:
    """Whether a join token stands for this node: only for one without a key, and only from where it joined."""
    return not node.public_key and node.claim in ("", claim_of(origin, node.address))


def find_known(name: str, public_key: str, address: str, origin: JoinOrigin, named: Sequence[Node]) -> Node | None:
    """The node that this registration is about, among those of its name; None for one that is new."""
    if origin.only_node and origin.only_node != name:
        raise Denied(f"cannot register {name} with this token: it is for the node {origin.only_node} alone")
    if public_key:
        return next((node for node in named if node.public_key == public_key), None)
    keyless = [node for node in named if not node.public_key]
    claim = claim_of(origin, address)
    known = next((node for node in keyless if node.claim == claim), None)
    if known is not None:
        return known
    if not origin.only_node and any(node.claim.startswith("token:") for node in keyless):
        raise Conflict(
            f"cannot register {name} with a shared join token: the node has a token of its own; use that one",
            code="identity_conflict",
        )
    # One that joined before claims were noted, or that was given a token of its own since.
    takes_over = [node for node in keyless if node.address == address and (origin.only_node or not node.claim)]
    return takes_over[0] if takes_over else None


def approval_lost(known: Node, address: str, networks: Collection[str]) -> str:
    """Why an approved node waits for approval again; nothing where it does not. An approval is for an address."""
    if not known.approved or known.address == address:
        return ""
    if address and known.address:
        host = parse_endpoint(address).host
        if host == parse_endpoint(known.address).host or is_within(host, networks):
            return ""
    return f"its address was {known.address or 'not told'} when it was approved, and is {address or 'not told'} now"
