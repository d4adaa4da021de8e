"""The tokens of LocalAI's workers, which frontends present to their file servers and engines.

Such a worker knows one secret, the token that it registered with, and expects it of everybody. The store keeps hashes
of tokens and no secrets, so this one is stored sealed with the admin token, which every frontend of a cluster is given
and the store does not have. A worker presents its token with every request to a frontend, so it is learned again after
either token has changed. A frontend without the admin token cannot use these workers and says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from enginehouse.core.errors import Unavailable
from enginehouse.core.ids import NodeId
from enginehouse.host.sealing import seal, unseal
from enginehouse.store import nodes
from enginehouse.store.db import Connection, Store

log = logging.getLogger(__name__)

PURPOSE = "enginehouse worker tokens"


class WorkerTokens:
    def __init__(self, store: Store, secret: Callable[[], str]) -> None:
        """`secret` returns the admin token that this frontend was given; "" if there is none."""
        self._store = store
        self._secret = secret
        self._known: dict[NodeId, str] = {}  # to write nothing for a token that is stored

    async def learn(self, node_id: NodeId, token: str) -> None:
        """Keep the token that the worker of a node without a key has just presented."""
        if not token or self._known.get(node_id) == token:
            return
        secret = self._secret()
        if not secret:
            log.warning("worker_token.not_kept node=%s reason=no_admin_token", node_id)
            self._known[node_id] = token  # logged once
            return

        def work(connection: Connection) -> None:
            if _opened(secret, nodes.sealed_tokens(connection, [node_id]).get(node_id, "")) != token:
                nodes.set_sealed_token(connection, node_id, seal(secret, PURPOSE, token))

        await self._store.transaction(work)
        self._known[node_id] = token

    def of(self, connection: Connection, node_id: NodeId) -> str:
        """The token of a node; raises `Unavailable` if this frontend cannot know it."""
        found = self.every(connection, [node_id]).get(node_id)
        if found is None:
            raise Unavailable(
                "cannot use this LocalAI worker: this frontend cannot read its token. Start every frontend with the "
                "same admin token (ENGINEHOUSE_ADMIN_TOKEN), and wait for the next heartbeat of the worker",
                code="token_unknown",
            )
        return found

    def every(self, connection: Connection, node_ids: list[NodeId]) -> dict[NodeId, str]:
        """The tokens of those of these nodes whose token this frontend can read."""
        secret = self._secret()
        if not node_ids or not secret:
            return {}
        sealed = nodes.sealed_tokens(connection, node_ids)
        found = {node_id: _opened(secret, text) for node_id, text in sealed.items()}
        return {node_id: token for node_id, token in found.items() if token is not None}


def _opened(secret: str, sealed: str) -> str | None:
    return unseal(secret, PURPOSE, sealed) if sealed else None
