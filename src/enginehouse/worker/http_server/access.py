"""Who may use the worker's HTTP server, and for what.

A LocalAI frontend presents the token with which this worker joined it. An Enginehouse frontend never does: there every
worker knows the join token, so one worker could write into another. It presents tickets instead, made from this node's
own token. Before the worker has joined, nobody gets in. Without a token there is no check only where a LocalAI
frontend let this worker join without one.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

from enginehouse.core.node_api import RegisterReply
from enginehouse.core.ticket import LOGS, PROGRAM_LOG, for_file, is_valid_ticket, ticket_key

_SCHEME = "Bearer "


class Access:
    """Updated by the agent after each registration and heartbeat."""

    def __init__(self, join_token: str, clock: Callable[[], float]) -> None:
        self._join_token = join_token
        self._clock = clock
        self._node: RegisterReply | None = None
        self._keys: tuple[str, ...] = ()  # of the node's token and of the one before
        self._mark = 0.0
        self._marked_at = 0.0

    def joined(self, node: RegisterReply) -> None:
        self._node = node
        if node.node_token:
            keys = (ticket_key(node.node_token), *self._keys)
            self._keys = tuple(dict.fromkeys(keys))[:2]
        else:
            self._keys = ()

    def marked(self, mark: float) -> None:
        """Note the store's time, as of now."""
        self._mark, self._marked_at = mark, self._clock()

    def may_use_files(self, authorization: str) -> bool:
        if self._node is None or self._node.node_token:
            return False
        if not self._join_token:
            return True
        return _is_same(authorization, self._join_token)

    def may_read_logs(self, authorization: str) -> bool:
        return self.may_use_files(authorization) or self._has_ticket(authorization, LOGS)

    def may_read_program_log(self, authorization: str) -> bool:
        """Whether the log of the worker itself may be read: LocalAI's frontends have no such route."""
        return self._has_ticket(authorization, PROGRAM_LOG)

    def may_read_file(self, authorization: str, sha256: str) -> bool:
        """Whether a node may read a file of a model: only with a ticket for that file."""
        return self._has_ticket(authorization, for_file(sha256))

    def _has_ticket(self, authorization: str, purpose: str) -> bool:
        if not authorization.startswith(_SCHEME):
            return False
        now = self._mark + self._clock() - self._marked_at
        ticket = authorization.removeprefix(_SCHEME)
        return any(is_valid_ticket(ticket, key, purpose, now) for key in self._keys)


def _is_same(authorization: str, token: str) -> bool:
    return hmac.compare_digest(authorization.encode("utf-8", "surrogateescape"), f"{_SCHEME}{token}".encode())
