"""Frontends that are equals: one that sleeps past its lease and is no longer obeyed, and one that is told to stop."""

from __future__ import annotations

import http.client
import os
import signal
import time
from typing import Any

import msgspec
import pytest
from tests.e2e.conftest import wait_for
from tests.fleet.cluster import LEASE_SECONDS, Fleet, Frontend
from tests.fleet.guests import row_of
from tests.fleet.speaker import speaking
from tests.fleet.tap import Tap, tapped
from tests.fleet.warehouse import MEGABYTE, Warehouse

from enginehouse.core import subjects
from enginehouse.core.ids import NodeId

NOTICE_SECONDS = 0.5  # half of what a frontend gives


def holder(fleet: Fleet, name: str) -> tuple[Any, ...]:
    """Who holds the one intent about a backend, under which fence and attempt."""
    (row,) = fleet.rows("select owner, fence, attempt from intents where subject = %s", f"backend:{name}")
    return row


def test_a_frontend_that_slept_past_its_lease_sends_and_changes_nothing(
    fleet: Fleet, warehouse: Warehouse, name: str
) -> None:
    """F-041. The work goes on under the other one, as the same attempt."""
    image = warehouse.publish(name, "one", megabytes=8)
    warehouse.proxy.bytes_per_second = MEGABYTE
    node_id = fleet.node("worker-2")["id"]
    with tapped(fleet, warehouse) as tap:
        operation = fleet.request("install", name, ["worker-2"], frontend=fleet.first)
        assert is_held(fleet, name)
        fleet.first.pause()
        owner = holder(fleet, name)[0]
        wait_for("the other to take over", lambda: holder(fleet, name)[0] != owner, 3 * LEASE_SECONDS)
        taken = holder(fleet, name)
        fleet.first.resume()
        wait_for("the sleeper to be ready", fleet.first.is_ready)
        ended = fleet.ended(operation, fleet.first)
        assert ended["status"] == "succeeded", ended
        assert row_of(ended, "worker-2")["attempt"] == 1
        assert tap.sent_to(node_id).count(subjects.INSTALL) == 1
        assert holder(fleet, name)[1:] == taken[1:], "taken over once"
    assert fleet.began("worker-2", f"install {name}") == 1
    assert warehouse.proxy.bytes_sent(image.layers[0].digest) == image.layers[0].size_bytes


def is_held(fleet: Fleet, name: str) -> bool:
    wait_for("it to be sent", lambda: holder(fleet, name)[2] == 1)
    wait_for("it to be begun", lambda: fleet.began("worker-2", f"install {name}") == 1)
    return True


def test_a_command_under_an_older_fence_is_refused_by_the_worker(fleet: Fleet, warehouse: Warehouse, name: str) -> None:
    """F-041. Here a second attempt is under way when the first sender wakes."""
    warehouse.publish(name, "one", megabytes=3)
    warehouse.proxy.bytes_per_second = 0.5 * MEGABYTE
    node_id = fleet.node("worker-2")["id"]
    with tapped(fleet, warehouse) as tap, speaking(fleet, warehouse) as speaker:
        operation = fleet.request("install", name, ["worker-2"], frontend=fleet.first)
        assert is_held(fleet, name)
        fleet.first.pause()
        first = holder(fleet, name)
        fleet.workers["worker-2"].kill()
        warehouse.calm()
        fleet.workers["worker-2"].start()
        ended = fleet.ended(operation, fleet.second)
        assert ended["status"] == "succeeded", ended
        assert row_of(ended, "worker-2")["attempt"] == 2
        assert holder(fleet, name)[1] > first[1]
        begun = fleet.began("worker-2", f"install {name}")
        inode = (fleet.backends_of("worker-2") / name).stat().st_ino
        fleet.first.resume()
        wait_for("the sleeper to be ready", fleet.first.is_ready)
        commands = commands_in(tap, node_id)
        assert [command["command"]["attempt"] for _, command in commands] == [1, 2]
        late = msgspec.json.decode(speaker.ask(subjects.node_subject(node_id, subjects.INSTALL), commands[0][0]))
        assert not late["success"], late
        assert late["error"], late
        assert fleet.began("worker-2", f"install {name}") == begun
        assert (fleet.backends_of("worker-2") / name).stat().st_ino == inode
        for frontend in fleet.frontends:
            assert frontend.operation(operation["jobID"])["status"] == "succeeded"
        assert tap.sent_to(node_id).count(subjects.INSTALL) == 3, "two attempts, and the late one that we sent"


def commands_in(tap: Tap, node_id: str) -> list[tuple[bytes, Any]]:
    """The installs that a node was sent, as bytes and as they read."""
    tap.settle()
    subject = subjects.node_subject(NodeId(node_id), subjects.INSTALL)
    return [(one.payload, msgspec.json.decode(one.payload)) for one in tap.heard if one.subject == subject]


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGHUP])
def test_a_frontend_that_is_asked_to_stop_says_so_and_goes_on_answering_for_a_moment(
    fleet: Fleet, asked: signal.Signals
) -> None:
    """F-118. What a balancer needs to learn it before somebody finds the door closed."""
    os.kill(fleet.first.pid, asked)
    wait_for("it to say so", lambda: status_of(fleet.first, "/readyz") == 503, 5)
    said_at = time.monotonic()
    while time.monotonic() - said_at < NOTICE_SECONDS:
        assert status_of(fleet.first, "/healthz") == 200, "closed before a balancer can know it"
    assert len(fleet.nodes(fleet.first)) == len(fleet.workers)
    assert fleet.first.stop(20) == 0
    assert fleet.second.is_ready()


def status_of(frontend: Frontend, path: str) -> int:
    """On a connection of its own; 0 where there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", frontend.port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
