"""Tickets: short-lived permissions that a frontend gives for the HTTP server of one worker.

A ticket is a signature over its purpose and its end, made with the hash of the node's token: the frontend stores that
hash and the worker knows the token, so nothing has to be distributed, and a ticket for one node is worth nothing at
another. Its end is a time of the store, which workers learn with every heartbeat, so clocks need not agree. Pure.
"""

from __future__ import annotations

import hashlib
import hmac

PREFIX = "ehticket"
LIFE_SECONDS = 60.0
# For one file, which the bearer was told to fetch and which does not change: a large one takes hours on a slow link.
FILE_LIFE_SECONDS = 6 * 3600.0
# A worker knows the store's time as of its last heartbeat; a ticket may look this much too young or too old.
TOLERANCE_SECONDS = 30.0
LOGS = "logs"
PROGRAM_LOG = "program-log"  # of the worker itself


def ticket_key(node_token: str) -> str:
    """The key that both sides have: what a frontend stores of a token."""
    return hashlib.sha256(node_token.encode()).hexdigest()


def for_file(sha256: str) -> str:
    """The purpose of a ticket for reading one file of a model."""
    return f"file:{sha256}"


def make_ticket(key: str, purpose: str, now: float) -> str:
    end = int(now + _life(purpose))
    return f"{PREFIX}.{end}.{_signature(key, purpose, end)}"


def is_valid_ticket(ticket: str, key: str, purpose: str, now: float) -> bool:
    parts = ticket.split(".")
    if len(parts) != 3 or parts[0] != PREFIX or not (parts[1].isascii() and parts[1].isdecimal()) or not key:
        return False
    if len(parts[1]) > 15 or not now - TOLERANCE_SECONDS <= int(parts[1]) <= now + _life(purpose) + TOLERANCE_SECONDS:
        return False
    return hmac.compare_digest(_signature(key, purpose, int(parts[1])).encode(), parts[2].encode())


def _life(purpose: str) -> float:
    return FILE_LIFE_SECONDS if purpose.startswith("file:") else LIFE_SECONDS


def _signature(key: str, purpose: str, end: int) -> str:
    return hmac.new(key.encode(), f"{purpose}\n{end}".encode(), hashlib.sha256).hexdigest()
