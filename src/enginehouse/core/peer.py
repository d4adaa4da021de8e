"""Peers: nodes from which another node may read a file, so that it leaves its source once.

A file is known by its digest alone, whatever the models are called that have it. A node that is fetching the file now
counts too, if it was asked before: the later one waits for it. The choice is a proposal. Reports may be out of date, so
the worker asks each peer and falls back to the source. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from enginehouse.core.ids import NodeId
from enginehouse.core.model import Model
from enginehouse.core.node import Node

MAX_PEERS = 4  # per file: one is enough, the others are for one that is away, busy or wrong
MAX_NAMED = 256  # in one message, which may have 256 KiB; a peer takes a quarter of one
# Sources on the machine itself or on storage that all nodes share.
_AT_HAND = ("builtin:", "file:")


class FilePeer(Struct, frozen=True):
    """Where a file may be read, and the ticket for it."""

    sha256: str
    address: str
    ticket: str


class ChosenPeer(Struct, frozen=True):
    sha256: str
    node_id: NodeId


def choose_peers(
    model: Model, own: NodeId, nodes: Sequence[Node], fetching: Mapping[NodeId, Collection[str]]
) -> tuple[ChosenPeer, ...]:
    """The peers for each file of a model, best first.

    `nodes` are those that may be asked; `fetching` has the digests that a node was told to fetch since its last report,
    in the order of the requests. Nodes that have the file come before those that fetch it. Which of several comes first
    depends on the asking node, so that many of them spread.
    """
    held = {node.id: {digest for one in node.report.models for digest in one.sha256} for node in nodes}
    found: list[ChosenPeer] = []
    for file in model.files:
        if not file.sha256 or file.uri.startswith(_AT_HAND):
            continue
        having = _spread([node.id for node in nodes if file.sha256 in held[node.id] and node.id != own], own)
        coming = [node_id for node_id, digests in fetching.items() if file.sha256 in digests and node_id in held]
        others = [node_id for node_id in coming if node_id != own and node_id not in having]
        found += [ChosenPeer(file.sha256, node_id) for node_id in (*having, *others)[:MAX_PEERS]]
    return tuple(dict.fromkeys(found))[:MAX_NAMED]


def _spread(candidates: list[NodeId], own: NodeId) -> list[NodeId]:
    if not candidates:
        return []
    ordered = sorted(candidates)
    start = sum(own.encode()) % len(ordered)
    return ordered[start:] + ordered[:start]
