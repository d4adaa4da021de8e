"""The command line against a fleet: one line per node, and exit codes that scripts can go by."""

from __future__ import annotations

import subprocess

import pytest
from tests.e2e.conftest import wait_for
from tests.fetch.faults import Answer
from tests.fleet.cluster import Fleet
from tests.fleet.guests import command, following
from tests.fleet.warehouse import MEGABYTE, Warehouse
from tests.worker.shelf import said_by


def test_an_install_is_followed_to_its_end_with_one_line_per_node(
    fleet: Fleet, warehouse: Warehouse, name: str
) -> None:
    warehouse.publish(name, "one")
    done = command(fleet, "backends", "install", name, "--node", "worker-1", "--node", "worker-2")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if f"install {name}" in line]
    assert [line.split()[1] for line in lines] == ["worker-1:", "worker-2:"]
    assert all(line.startswith(("✓", "ok")) for line in lines)
    for worker in ("worker-1", "worker-2"):
        assert said_by(fleet.backends_of(worker) / name) == "one"


def test_what_failed_on_one_node_is_told_and_tried_again_there(fleet: Fleet, warehouse: Warehouse, name: str) -> None:
    image = warehouse.publish(name, "one")
    warehouse.proxy.plan(Answer(404), path=image.layers[0].digest, times=1)
    some = command(fleet, "backends", "install", name, "--node", "worker-3", "--node", "worker-4")
    assert some.returncode == 3, some.stdout + some.stderr
    lines = [line for line in some.stdout.splitlines() if f"install {name}" in line]
    good = [line for line in lines if line.startswith(("✓", "ok"))]
    bad = [line for line in lines if line.startswith(("✗", "FAILED"))]
    assert (len(good), len(bad)) == (1, 1)
    operation = next(one for one in fleet.first.get("/api/operations")["operations"] if one["name"] == name)
    assert operation["status"] == "partial"

    again = command(fleet, "ops", "retry", operation["jobID"][:8])
    assert again.returncode == 0, again.stderr
    failed = bad[0].split()[1].rstrip(":")
    assert [line.split()[1] for line in again.stdout.splitlines()] == [f"{failed}:"]
    assert said_by(fleet.backends_of(failed) / name) == "one"


def test_what_fails_everywhere_ends_with_one(fleet: Fleet, warehouse: Warehouse, name: str) -> None:
    image = warehouse.publish(name, "one")
    warehouse.proxy.plan(Answer(404), path=image.layers[0].digest, times=None)
    failed = command(fleet, "backends", "install", name, "--node", "worker-1")
    assert failed.returncode == 1, failed.stdout
    assert "worker-1" in failed.stdout
    unknown = command(fleet, "backends", "install", "no-such-engine", "--node", "worker-1")
    assert unknown.returncode == 5
    assert "cannot" in unknown.stderr


def test_a_cancel_ends_the_operation_and_whoever_follows_it(fleet: Fleet, warehouse: Warehouse, name: str) -> None:
    warehouse.publish(name, "one", megabytes=4)
    warehouse.proxy.bytes_per_second = 0.5 * MEGABYTE
    with following(fleet, "backends", "install", name, "--node", "worker-2") as follower:
        operation = wait_for(
            "it to be under way",
            lambda: next(
                (
                    one
                    for one in fleet.first.get("/api/operations")["operations"]
                    if one["name"] == name and one["status"] == "running"
                ),
                None,
            ),
        )
        cancelled = command(fleet, "ops", "cancel", operation["jobID"])
        assert cancelled.returncode == 0, cancelled.stderr
        assert "cancelled" in cancelled.stdout
        told, _ = follower.communicate(timeout=10)
        assert follower.returncode == 1
    assert "worker-2" in told
    assert "cancelled" in told
    late = command(fleet, "ops", "cancel", operation["jobID"])
    assert late.returncode == 1
    assert "it has ended already" in late.stderr


def test_plans_and_upgrades_are_shown_without_being_done(fleet: Fleet, warehouse: Warehouse, name: str) -> None:
    warehouse.publish(name, "one")
    planned = command(fleet, "backends", "plan", name, "--node", "worker-1", "--node", "worker-5")
    assert planned.returncode == 0, planned.stderr
    assert _cells(planned, "worker-1")[1] == "install"
    assert _cells(planned, "worker-5")[1] == "install"
    assert not (fleet.backends_of("worker-1") / name).exists()
    fleet.done("install", name, ["worker-1"])
    new = warehouse.publish(name, "two")
    wait_for("the report", lambda: any(one["name"] == name for one in fleet.node("worker-1")["backends"]))
    offered = command(fleet, "backends", "upgrades")
    assert offered.returncode == 0, offered.stderr
    row = _cells(offered, name)
    assert row[1] == "worker-1"
    assert new.digest.removeprefix("sha256:").startswith(row[-1])
    planned = command(fleet, "backends", "plan", name, "--upgrade")
    assert _cells(planned, "worker-1")[1] == "upgrade"
    assert "left out: worker-5" in planned.stderr
    upgraded = command(fleet, "backends", "upgrade", name)
    assert upgraded.returncode == 0, upgraded.stdout + upgraded.stderr
    assert said_by(fleet.backends_of("worker-1") / name) == "two"
    wait_for("nothing to be offered", lambda: f"{name} " not in command(fleet, "backends", "upgrades").stdout, 10)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("nodes", "list"), 4), (("ops", "show", "00000000"), 4)],
)
def test_a_wrong_token_is_refused_with_its_own_code(fleet: Fleet, arguments: tuple[str, ...], code: int) -> None:
    assert command(fleet, *arguments, token="eh-wrong").returncode == code


def _cells(shown: subprocess.CompletedProcess[str], first: str) -> list[str]:
    """The row of a table that begins so."""
    return next(line.split() for line in shown.stdout.splitlines() if line.startswith(first))
