"""One transaction that somebody waits for, and how it is given up: whoever waits is told within a limit, and what was
given up is not committed afterwards.

The thread that runs it may hang in the driver for as long as the server does, so giving up cuts the connection under
it: the driver returns with an error, the server rolls back when it sees the end of the connection. A transaction is
either given up before its commit begins or it is not given up: whoever waits for a commit that has begun waits for its
outcome. Only a commit that was sent already, and whose answer never came, stays unknown.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import threading
from contextlib import suppress

import psycopg

Driver = psycopg.Connection | sqlite3.Connection


class GivenUp(Exception):
    """Nobody waits for this transaction any more. Never leaves the thread's future."""


class Attempt:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_given_up = False
        self._is_committing = False
        self._held: socket.socket | sqlite3.Connection | None = None

    def hold(self, connection: Driver) -> None:
        """The connection that is used from now on. In the thread of the transaction."""
        # A handle of our own: the number of the driver's may belong to another connection by the time it is cut.
        held = connection if isinstance(connection, sqlite3.Connection) else _handle(connection)
        with self._lock:
            previous, self._held = self._held, held
            is_given_up = self._is_given_up
        _release(previous)
        if is_given_up:
            raise GivenUp

    def begin_commit(self) -> None:
        """To be called right before the commit: from here on the transaction cannot be given up."""
        with self._lock:
            if self._is_given_up:
                raise GivenUp
            self._is_committing = True

    def begin_again(self) -> None:
        """The commit failed, or was not reached: the transaction is run once more, and may be given up again."""
        with self._lock:
            self._is_committing = False
            if self._is_given_up:
                raise GivenUp

    def end(self) -> None:
        with self._lock:
            previous, self._held = self._held, None
        _release(previous)

    def give_up(self) -> bool:
        """Whether nothing of it is or will be committed. From any thread; returns at once."""
        with self._lock:
            if self._is_committing:
                return False
            self._is_given_up = True
            self._cut_connection()
            return True

    def cut(self) -> None:
        """End it even in its commit, whose outcome stays unknown. From any thread; returns at once."""
        with self._lock:
            self._is_given_up = True
            self._cut_connection()

    def _cut_connection(self) -> None:
        if isinstance(self._held, sqlite3.Connection):
            with suppress(sqlite3.ProgrammingError):  # closed meanwhile
                self._held.interrupt()
        elif self._held is not None:
            with suppress(OSError):  # the other end was faster
                self._held.shutdown(socket.SHUT_RDWR)


def _handle(connection: psycopg.Connection) -> socket.socket | None:
    try:
        return socket.socket(fileno=os.dup(connection.fileno()))
    except (psycopg.Error, OSError):
        return None  # it is closed; whatever is asked of it fails at once


def _release(held: socket.socket | sqlite3.Connection | None) -> None:
    if isinstance(held, socket.socket):
        held.close()
