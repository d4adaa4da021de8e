"""Listening sockets: a port that several processes share."""

from __future__ import annotations

import socket

import pytest

from enginehouse.core.errors import Conflict
from enginehouse.host import listen


def test_a_reserved_port_refuses_connections_until_one_of_its_sharers_listens() -> None:
    with listen.reserve("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
        with listen.share("127.0.0.1", port) as first, listen.share("127.0.0.1", port) as second:
            first.listen()
            socket.create_connection(("127.0.0.1", port), 5).close()
            second.listen()
            first.close()
            socket.create_connection(("127.0.0.1", port), 5).close()


def test_a_port_on_which_others_listen_cannot_be_reserved_even_if_they_share_it() -> None:
    with listen.reserve("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
        with listen.share("127.0.0.1", port) as sharer:
            sharer.listen()
            with pytest.raises(Conflict) as caught:
                listen.reserve("127.0.0.1", port)
    assert caught.value.code == "port_in_use"


def test_a_port_of_a_socket_that_does_not_share_cannot_be_shared() -> None:
    with socket.create_server(("127.0.0.1", 0)) as alone, pytest.raises(Conflict):
        listen.share("127.0.0.1", alone.getsockname()[1])
