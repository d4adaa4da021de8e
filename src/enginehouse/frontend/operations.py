"""Wishes become rows here: one Operation and one Intent per target node, in one transaction, before anybody is
answered.

Targets are fixed at this moment and shown; nodes that cannot take the wish are named with the reason instead of being
sent what must fail. Being away is no such reason: a wish waits. This is the only place that creates, cancels and
supersedes operations and intents (the loader adds its steps through `store` too).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

from msgspec import Struct

from enginehouse.core import backend as backends
from enginehouse.core.action import Action, InstallBackend, RemoveBackend, StopReplica
from enginehouse.core.errors import Conflict, Hopeless, Invalid, NotFound
from enginehouse.core.name import check_name
from enginehouse.core.node import Node
from enginehouse.core.operation import Excluded, Operation, OperationKind
from enginehouse.frontend.board import Board
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.nodes import find_node
from enginehouse.store import db, history, nodes, operations, replicas
from enginehouse.store.db import Connection, Store

PRUNE_SECONDS = 600.0  # how often the past is cut; nobody waits for it
KEPT_SECONDS = 7 * 24 * 3600.0
KEPT_OPERATIONS = 1000
_PRUNED_AT_ONCE = 500  # so that no transaction is long


class BackendWish(Struct, frozen=True, kw_only=True):
    """What someone wants of a backend. No nodes named means every approved node."""

    kind: OperationKind
    name: str
    author: str
    nodes: tuple[str, ...] | None = None
    force: bool = False


class Operations:
    def __init__(self, store: Store, board: Board, galleries: Galleries, wake: Callable[[], None]) -> None:
        self._store = store
        self._board = board
        self._galleries = galleries
        self._wake = wake

    async def request(self, wish: BackendWish) -> str:
        """Accept a wish and return the operation's id; on return it is stored, whatever happens to this process."""
        gallery, at, plain = wish.name.rpartition("@")
        check_name(plain, "backend")
        if at:
            check_name(gallery, "gallery")

        def work(connection: Connection) -> str:
            targets = self._targets(connection, wish)
            if wish.kind == "delete":
                actions, excluded = self._removals(wish, targets)
            else:
                actions, excluded = self._installs(wish, targets)
            if not actions:
                raise self._nothing_to_do(wish, excluded)
            operation = Operation(
                id=str(uuid.uuid4()),
                kind=wish.kind,
                name=wish.name,
                author=wish.author,
                created_at=db.now(connection),
                targets=tuple(node.id for node, _ in actions),
                excluded=tuple(excluded),
            )
            return _insert(connection, operation, actions)

        return await self._accept(work)

    async def request_unload(self, model: str, node: str | None, author: str) -> str:
        """Stop the replicas of a model, on one node or everywhere."""

        def work(connection: Connection) -> str:
            only = find_node(connection, node).id if node else None
            found = [one for one in replicas.of_model(connection, model) if only in (None, one.node_id)]
            if not found:
                where = f" on {node}" if node else ""
                raise NotFound(f"cannot unload {model}: no replica of it runs{where}", code="not_found", param="model")
            actions: list[tuple[Node, Action]] = []
            for replica in found:
                at = nodes.get(connection, replica.node_id)
                if at is not None:
                    actions.append((at, StopReplica(model=model, slot=replica.slot)))
            operation = Operation(
                id=str(uuid.uuid4()),
                kind="unload",
                name=model,
                author=author,
                created_at=db.now(connection),
                targets=tuple(at.id for at, _ in actions),
            )
            return _insert(connection, operation, actions)

        return await self._accept(work)

    async def prune_step(self) -> None:
        """Forget what ended more than a week ago, all but the last thousand operations."""

        def work(connection: Connection) -> int:
            return history.prune(connection, db.now(connection) - KEPT_SECONDS, KEPT_OPERATIONS, _PRUNED_AT_ONCE)

        while await self._store.transaction(work) == _PRUNED_AT_ONCE:
            pass

    async def _accept(self, work: Callable[[Connection], str]) -> str:
        operation_id = await self._store.transaction(work)
        self._wake()
        await self._board.operations_changed([operation_id])
        return operation_id

    def _targets(self, connection: Connection, wish: BackendWish) -> list[Node]:
        if wish.nodes is None:
            found = [node for node in nodes.every(connection) if node.is_target]
            if not found:
                raise Conflict(
                    f"cannot {wish.kind} {wish.name}: no node is approved; see `enginehouse nodes list`",
                    code="node_not_approved",
                )
            return found
        if not wish.nodes:
            raise Invalid(
                f"cannot {wish.kind} {wish.name}: the list of nodes is empty",
                code="invalid_name",
                param="nodes",
            )
        found = [find_node(connection, name) for name in dict.fromkeys(wish.nodes)]
        for node in found:
            if node.node_type != "backend":
                raise Invalid(
                    f"cannot {wish.kind} {wish.name} on {node.name}: an {node.node_type} node takes no backends",
                    code="unsupported",
                    param="nodes",
                )
            if not node.approved:
                raise Conflict(
                    f"cannot {wish.kind} {wish.name} on {node.name}: it waits for approval; "
                    f"approve it with `enginehouse nodes approve {node.name}`",
                    code="node_not_approved",
                )
        return found

    def _installs(self, wish: BackendWish, targets: Sequence[Node]) -> tuple[list[tuple[Node, Action]], list[Excluded]]:
        builds, reasons = self._galleries.resolve_each(wish.name, targets)
        actions: list[tuple[Node, Action]] = []
        plain = wish.name.rpartition("@")[2]
        for node in targets:
            if node.id not in builds:
                continue
            resolved = builds[node.id]
            if wish.kind == "upgrade" and backends.find(node.report.backends, resolved.directory) is None:
                reasons[node.id] = f"{plain} is not installed there"
                continue
            actions.append(
                (
                    node,
                    InstallBackend(backend=plain, resolved=resolved, force=wish.force, upgrade=wish.kind == "upgrade"),
                )
            )
        return actions, _excluded(targets, reasons)

    def _removals(self, wish: BackendWish, targets: Sequence[Node]) -> tuple[list[tuple[Node, Action]], list[Excluded]]:
        """A delete goes to the nodes that report the backend and to those that may have it without having reported it
        yet (away, or an install under way); not to those for which there is no build of it."""
        plain = wish.name.rpartition("@")[2]
        reported = any(self._directory(plain, node) for node in targets)
        if not reported:
            self._galleries.known(wish.name)  # a name that nobody knows is a mistake, not an empty success
        actions: list[tuple[Node, Action]] = []
        reasons: dict[str, str] = {}
        for node in targets:
            directory = self._directory(plain, node)
            if directory is None:
                try:
                    directory = self._galleries.resolve(wish.name, node).directory
                except NotFound:
                    directory = plain
                except Hopeless:
                    reasons[node.id] = f"{plain} is not installed there, and there is no build of it for this machine"
                    continue
            actions.append((node, RemoveBackend(backend=plain, directory=directory)))
        return actions, _excluded(targets, reasons)

    def _directory(self, name: str, node: Node) -> str | None:
        for backend in node.report.backends:
            if backend.name == name:
                return backend.meta_backend_for or backend.name
        return None

    def _nothing_to_do(self, wish: BackendWish, excluded: Sequence[Excluded]) -> Conflict:
        reasons = "; ".join(f"{one.node_name}: {one.reason}" for one in excluded)
        return Conflict(f"cannot {wish.kind} {wish.name}: no node can take it ({reasons})", code="unsupported")


def _insert(connection: Connection, operation: Operation, actions: Sequence[tuple[Node, Action]]) -> str:
    operations.insert(connection, operation)
    # Always in the same order: two wishes for the same nodes must not wait for each other's locks crosswise.
    for node, action in sorted(actions, key=lambda pair: pair[0].id):
        operations.add_intent(connection, operation.id, node.id, action, str(uuid.uuid4()), operation.created_at)
    return operation.id


def _excluded(targets: Sequence[Node], reasons: dict[str, str]) -> list[Excluded]:
    return [Excluded(node.id, node.name, reasons[node.id]) for node in targets if node.id in reasons]
