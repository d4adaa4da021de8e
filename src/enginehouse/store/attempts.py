"""One transaction under a time limit, and how it is abandoned.

The caller gets an answer within the limit, and an abandoned transaction is never committed afterwards. The thread that
runs it may hang in the driver for as long as the server does, so abandoning it shuts down the connection: the driver
returns with an error, and the server rolls back when it sees the end of the connection.

A transaction can be abandoned only before its commit begins. Once a commit has begun, the caller waits for its outcome.
The outcome stays unknown only if the commit was sent and its answer never arrived.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # importing it takes a twelfth of a frontend's start, and SQLite does not need it
    import psycopg

Driver: TypeAlias = "psycopg.Connection | sqlite3.Connection"


class GivenUp(Exception):
    """The caller has abandoned this transaction. Never leaves the thread's future."""


class Attempt:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_given_up = False
        self._is_committing = False
        self._held: socket.socket | sqlite3.Connection | None = None

    def hold(self, connection: Driver) -> None:
        """Use this connection from now on. Called in the thread of the transaction."""
        # A duplicate of the file descriptor: the driver's own number may belong to another connection by the time it is
        # shut down.
        held = connection if isinstance(connection, sqlite3.Connection) else _handle(connection)
        with self._lock:
            previous, self._held = self._held, held
            is_given_up = self._is_given_up
        _release(previous)
        if is_given_up:
            raise GivenUp

    def begin_commit(self) -> None:
        """Call right before the commit: from here on, the transaction cannot be abandoned."""
        with self._lock:
            if self._is_given_up:
                raise GivenUp
            self._is_committing = True

    def begin_again(self) -> None:
        """Call before the transaction is retried. It may be abandoned again."""
        with self._lock:
            self._is_committing = False
            if self._is_given_up:
                raise GivenUp

    def end(self) -> None:
        with self._lock:
            previous, self._held = self._held, None
        _release(previous)

    def give_up(self) -> bool:
        """Abandon it; True if nothing of it is or will be committed. Callable from any thread; does not block."""
        with self._lock:
            if self._is_committing:
                return False
            self._is_given_up = True
            self._cut_connection()
            return True

    def cut(self) -> None:
        """End it even during its commit; the outcome then stays unknown. Callable from any thread; does not block."""
        with self._lock:
            self._is_given_up = True
            self._cut_connection()

    def _cut_connection(self) -> None:
        if isinstance(self._held, sqlite3.Connection):
            with suppress(sqlite3.ProgrammingError):  # already closed
                self._held.interrupt()
        elif self._held is not None:
            with suppress(OSError):  # already disconnected by the peer
                self._held.shutdown(socket.SHUT_RDWR)


def _handle(connection: psycopg.Connection) -> socket.socket | None:
    import psycopg

    try:
        return socket.socket(fileno=os.dup(connection.fileno()))
    except (psycopg.Error, OSError):
        return None  # already closed; every statement on it fails at once


def _release(held: socket.socket | sqlite3.Connection | None) -> None:
    if isinstance(held, socket.socket):
        held.close()
