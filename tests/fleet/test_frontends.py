"""Frontends that are equals: one that sleeps past its lease, and three that all reconcile as fast as they can."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import psycopg
from tests.e2e.conftest import wait_for
from tests.fetch.faults import Stall
from tests.fleet.guests import guest_frontends, row_of
from tests.fleet.house import LEASE_SECONDS, Fleet, Frontend
from tests.fleet.speaker import speaking
from tests.fleet.tap import Tap, tapped
from tests.fleet.warehouse import MEGABYTE, Warehouse
from tests.worker.shelf import said_by

from enginehouse.core import wire

IS_PROOF = os.environ.get("ENGINEHOUSE_PROOF") == "1"
NOTICE_SECONDS = 0.5  # half of what a frontend gives
MIXED = 24 if IS_PROOF else 6  # backends: a third stays, a third is deleted again, a third is cancelled


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
        assert tap.sent_to(node_id).count(wire.INSTALL) == 1
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
        late = msgspec.json.decode(speaker.ask(wire.node_subject(node_id, wire.INSTALL), commands[0][0]))
        assert not late["success"], late
        assert late["error"], late
        assert fleet.began("worker-2", f"install {name}") == begun
        assert (fleet.backends_of("worker-2") / name).stat().st_ino == inode
        for frontend in fleet.frontends:
            assert frontend.operation(operation["jobID"])["status"] == "succeeded"
        assert tap.sent_to(node_id).count(wire.INSTALL) == 3, "two attempts, and the late one that we sent"


def commands_in(tap: Tap, node_id: str) -> list[tuple[bytes, Any]]:
    """The installs that a node was sent, as bytes and as they read."""
    tap.settle()
    subject = wire.node_subject(node_id, wire.INSTALL)
    return [(one.payload, msgspec.json.decode(one.payload)) for one in tap.heard if one.subject == subject]


def test_three_hasty_frontends_have_one_effect_per_intent(
    fleet: Fleet, warehouse: Warehouse, names: Callable[[int], list[str]]
) -> None:
    """F-046. One of them is killed in the middle, and comes back."""
    engines = names(MIXED)
    kept, deleted, cancelled = engines[0::3], engines[1::3], engines[2::3]
    images = {name: warehouse.publish(name, "one", megabytes=0.5) for name in engines}
    for name, image in images.items():
        if name in cancelled:
            # Only the bytes of what is cancelled never end, so that it cannot be done before.
            warehouse.proxy.plan(Stall(1000), path=image.layers[0].digest, times=None)
    operations: dict[str, dict[str, Any]] = {}
    with tapped(fleet, warehouse) as tap, contextlib.ExitStack() as stack:
        hasty = stack.enter_context(guest_frontends(fleet, ("hasty-1", "hasty-2", "hasty-3"), "--reconcile", "100ms"))
        for number, name in enumerate(deleted):
            fleet.done("install", name, frontend=hasty[number % 3])

        def ask(number: int) -> None:
            name, frontend = engines[number], hasty[number % 3]
            made = fleet.request("delete" if name in deleted else "install", name, frontend=frontend)
            if name in cancelled:
                hasty[(number + 1) % 3].post(f"/api/operations/{made['jobID']}/cancel", {})
            operations[name] = made

        askers = [threading.Thread(target=ask, args=(number,)) for number in range(MIXED)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join(30)
        hasty[0].kill()
        hasty[0].start()
        assert len(operations) == MIXED
        ended = {name: fleet.ended(operation, hasty[1]) for name, operation in operations.items()}
        wait_for("the killed one to be ready", hasty[0].is_ready)
        for frontend in fleet.frontends:
            for name, operation in ended.items():
                told = frontend.operation(operation["jobID"])
                assert statuses(told) == statuses(operation), (frontend.name, name)
        for name in kept + deleted:
            assert ended[name]["status"] == "succeeded", ended[name]
        for name in cancelled:
            assert ended[name]["status"] == "cancelled", ended[name]
        tap.settle()
        sent = Counter(
            (message.subject, command["intent"], command["attempt"])
            for message in tap.heard
            if message.payload and (command := msgspec.json.decode(message.payload).get("command"))
        )
        assert set(sent.values()) == {1}, "no attempt is sent twice"
    for name in kept + deleted:
        # A node that is thought away for a moment may be told again; it does not do it again.
        bulk = images[name].layers[0]
        assert warehouse.proxy.bytes_sent(bulk.digest) == bulk.size_bytes * len(fleet.workers), name
    for worker in fleet.workers:
        for name in kept:
            assert said_by(fleet.backends_of(worker) / name) == "one"
        for name in deleted + cancelled:
            assert not (fleet.backends_of(worker) / name).exists()
        wait_for("nothing to be left of what was cancelled", partial(is_clean, fleet, worker), 10)


def is_clean(fleet: Fleet, worker: str) -> bool:
    return fleet.residue_of(worker) == []


def test_a_cancel_that_meets_a_change_of_the_same_row_is_carried_out_after_it(
    fleet: Fleet, warehouse: Warehouse, name: str
) -> None:
    """F-046. Between its look and its writing somebody else writes, as a frontend does that claims it."""
    image = warehouse.publish(name, "one")
    warehouse.proxy.plan(Stall(1000), path=image.layers[0].digest, times=None)
    operation = fleet.request("install", name, ["worker-2"])
    assert is_held(fleet, name)
    waiting = "select 1 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    with psycopg.connect(fleet.database_url) as connection:
        connection.execute("update intents set version = version + 1 where subject = %s", (f"backend:{name}",))
        cancels = threading.Thread(target=fleet.second.post, args=(f"/api/operations/{operation['jobID']}/cancel", {}))
        cancels.start()
        wait_for("the cancel to wait", lambda: fleet.rows(waiting))
        connection.commit()
        cancels.join(20)
    assert fleet.first.operation(operation["jobID"])["status"] == "cancelled"


def test_a_frontend_that_is_asked_to_stop_says_so_and_goes_on_answering_for_a_moment(fleet: Fleet) -> None:
    """F-118. What a balancer needs to learn it before somebody finds the door closed."""
    os.kill(fleet.first.pid, signal.SIGTERM)
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


def statuses(operation: dict[str, Any]) -> tuple[str, list[tuple[str, str, int]]]:
    rows = [(row["node_name"], row["status"], row["attempt"]) for row in operation["nodes"]]
    return operation["status"], sorted(rows)
