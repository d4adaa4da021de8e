"""Which node a registration belongs to, and whether its approval is still valid. Pure.

A machine with a key is identified by that key. A machine without one (a LocalAI worker) is identified by its join token
if the token is for one node, otherwise by its address and source host. Another machine with the same shared token thus
becomes another node with its own approval, and the first node keeps working.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import sha256

from msgspec import Struct

from enginehouse.core.address import is_loopback as is_loopback_host
from enginehouse.core.address import is_within, parse_endpoint, plain_host
from enginehouse.core.errors import Conflict, Denied, Unauthenticated
from enginehouse.core.fingerprint import fingerprint_of, is_fingerprint_of
from enginehouse.core.name import shown
from enginehouse.core.node import Node


class JoinOrigin(Struct, frozen=True):
    """The origin of a registration: its token, the node that the token is restricted to, and the source host. The
    default is this process itself.
    """

    token_id: str = ""
    only_node: str = ""
    host: str = ""

    @property
    def is_loopback(self) -> bool:
        return not self.host or is_loopback_host(self.host)


def claim_of(origin: JoinOrigin, address: str) -> str:
    """What distinguishes a machine without a key from others of its name."""
    if origin.only_node:
        return f"token:{origin.token_id}"
    # Loopback has two spellings; a restarted worker may use the other one.
    host = "loopback" if origin.is_loopback else plain_host(origin.host)
    return sha256(f"{address}\n{host}".encode()).hexdigest()


def may_speak_for(origin: JoinOrigin, node: Node) -> bool:
    """Whether a join token may act for this node: it has no key, and the origin is the one it joined from."""
    return not node.public_key and node.claim in ("", claim_of(origin, node.address))


def find_known(name: str, public_key: str, address: str, origin: JoinOrigin, named: Sequence[Node]) -> Node | None:
    """The node of this registration, among those of its name; None for a new one."""
    if origin.only_node and origin.only_node != name:
        raise Denied(f"cannot register {name} with this token: it is only valid for the node {origin.only_node}")
    if public_key:
        return next((node for node in named if node.public_key == public_key), None)
    keyless = [node for node in named if not node.public_key]
    claim = claim_of(origin, address)
    known = next((node for node in keyless if node.claim == claim), None)
    if known is not None:
        return known
    if not origin.only_node and any(node.claim.startswith("token:") for node in keyless):
        raise Conflict(
            f"cannot register {name} with a shared join token: the node has its own token. Use that one",
            code="identity_conflict",
        )
    # A node that joined before claims were recorded, or that got its own token since.
    takes_over = [node for node in keyless if node.address == address and (origin.only_node or not node.claim)]
    return takes_over[0] if takes_over else None


def uninvited(name: str) -> Unauthenticated:
    return Unauthenticated(
        f"cannot register {name} without a join token: this server has not approved its key. Create a token with "
        "`enginehouse tokens create --role join`, or approve the key with --approve-keys"
    )


def check_fingerprint(node: Node, fingerprint: str) -> None:
    """Refuse a node with another key. An empty fingerprint is that of every key."""
    if fingerprint and not is_fingerprint_of(fingerprint, node.public_key):
        has = f"its key is {fingerprint_of(node.public_key)}" if node.public_key else "it has no key"
        raise Conflict(
            f"cannot approve {node.name}: {has}, not {shown(fingerprint)}. Another machine may use its name",
            code="fingerprint_mismatch",
            param="fingerprint",
        )


def approval_lost(known: Node, address: str, networks: Collection[str]) -> str:
    """Why an approved node needs a new approval; "" if it does not. An approval is for an address."""
    if not known.approved or known.address == address:
        return ""
    if address and known.address:
        host = parse_endpoint(address).host
        if host == parse_endpoint(known.address).host or is_within(host, networks):
            return ""
    return f"its address was {known.address or 'not given'} when it was approved and is {address or 'not given'} now"
