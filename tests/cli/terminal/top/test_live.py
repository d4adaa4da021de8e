"""`enginehouse top` beside a real cluster: what is seen is so, and what is pressed is done."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cli.terminal.top.real import Town, running_town, screen, seen, until
from tests.e2e.conftest import wait_for
from tests.fleet.warehouse import MEGABYTE

pytestmark = pytest.mark.slow
WORKER = "worker-1"


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    with running_town(tmp_path_factory.mktemp("town")) as made:
        yield made


@pytest.fixture(autouse=True)
def calm(town: Town) -> None:
    town.warehouse.calm()


async def press(pilot: Any, keys: str) -> None:
    await pilot.press(*("enter" if key == "\n" else key for key in keys))


def test_in_a_terminal_a_node_is_approved_an_install_is_seen_and_a_killed_frontend_is_only_a_pause(town: Town) -> None:
    fleet = town.fleet
    town.warehouse.publish("engine-a", "one", megabytes=1)
    fleet.add_worker("shed-pi", fleet.first, approve=False)
    with screen(town.environment) as terminal:
        terminal.wait("the cluster", "1 of 1 node healthy", "● live", WORKER, "linux/amd64")
        terminal.wait("the pending node", "NEEDS YOU  shed-pi asks to join (")
        terminal.keys("k", "a")
        fingerprint = fleet.node("shed-pi")["fingerprint"]
        terminal.wait("the question", "Approve shed-pi?", f"Fingerprint: {fingerprint}")
        terminal.keys("y")
        terminal.wait("it to be healthy", "2 of 2 nodes healthy", "Nothing needs you.")
        assert fleet.node("shed-pi")["approved"]

        town.warehouse.proxy.bytes_per_second = 0.5 * MEGABYTE
        terminal.keys("o")
        operation = fleet.request("install", "engine-a")
        terminal.wait("the operation", "Install engine-a", "of 2 nodes", "1 operation running")
        terminal.keys("Enter")
        terminal.wait("both nodes", f"◐ Downloading {WORKER}", "◐ Downloading shed-pi", " of 977.2 KiB")
        town.warehouse.proxy.bytes_per_second = None
        terminal.wait("the end", "Install engine-a: 2 of 2 done.", f"● Done        {WORKER}", "977.2 of 977.2 KiB")
        assert fleet.first.operation(operation["jobID"])["status"] == "succeeded"

        fleet.first.kill()
        terminal.wait("the loss to be shown", "◌ reconnecting · data ")
        assert "Install engine-a: 2 of 2 done." in terminal.text(), "the last known state stays"
        fleet.first.start()
        terminal.wait("the connection to be back", "● live")
        fleet.until_healthy()
        terminal.keys("f")
        terminal.resize(80, 24)
        terminal.wait("the smaller screen", "2 of 2 nodes healthy", "● live", "? help · q quit")
        assert re.search(r"\x1b\[(3[1-7]|9[1-7])", terminal.text("-e"))
        terminal.keys("q")
        terminal.wait("its end", "exit=0")


def test_without_colour_the_same_is_said_by_marks_and_words(town: Town) -> None:
    with screen({**town.environment, "NO_COLOR": "1"}, 80, 24) as terminal:
        terminal.wait("the cluster", "● live", "● healthy", WORKER)
        assert not re.search(r"\x1b\[[0-9;]*(3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]", terminal.text("-e"))
        terminal.keys("C-c")
        terminal.wait("its end", "exit=130")


async def test_a_node_is_drained_resumed_and_removed_by_keys(town: Town) -> None:
    fleet = town.fleet
    body = {"name": "attic", "token": fleet.tokens["join"], "platform": "linux/amd64", "capability": "default"}
    fleet.first.client.request("POST", "/api/node/register", body, object, token=fleet.tokens["join"])
    app = town.app()
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, "the nodes", lambda: WORKER in seen(app) and "attic" in seen(app))
        await press(pilot, f"/{WORKER}\n")
        await until(pilot, "only that node", lambda: WORKER in app.view.plain and "attic" not in app.view.plain)
        await press(pilot, "dn")
        assert not fleet.node(WORKER)["drained"]
        await press(pilot, "dy")
        await until(pilot, "the drain", lambda: "◒ drained" in app.view.plain)
        assert fleet.node(WORKER)["drained"]
        await press(pilot, "r")
        await until(pilot, "it to be resumed", lambda: "● healthy" in app.view.plain)
        await pilot.press("escape", "home")
        await until(pilot, "the other node to be selected", lambda: "attic" in app.view.plain)
        assert app.view.target.id == fleet.node("attic")["id"]
        await press(pilot, "xattik\n")
        await until(pilot, "the refusal", lambda: "That is not the name. Nothing was done" in seen(app))
        await pilot.press("escape")
        assert fleet.node("attic")
        await press(pilot, "xattic\n")
        await until(pilot, "it to be gone", lambda: "attic" not in app.view.plain)
        assert "attic is removed" in seen(app)
    assert not fleet.node("attic")


async def test_an_upgrade_shows_its_plan_and_is_done_after_a_yes(town: Town) -> None:
    town.warehouse.publish("engine-b", "one")
    before = town.fleet.done("install", "engine-b", [WORKER])
    town.warehouse.publish("engine-b", "two")
    app = town.app()
    async with app.run_test(size=(100, 30)) as pilot:
        await press(pilot, "gb")
        await until(pilot, "the backend", lambda: "engine-b" in app.view.plain)
        await press(pilot, "/engine-b\n")
        await press(pilot, "u")
        await until(pilot, "the plan", lambda: "Do it on 1 node?" in seen(app))
        assert re.search(rf"{WORKER} +upgrade +[0-9a-f]+ → [0-9a-f]+", seen(app))
        await press(pilot, "y")
        await press(pilot, "o")
        await until(pilot, "its end", lambda: re.search(r"● Done +Upgrade engine-b", app.view.plain))
    (row,) = before["nodes"]
    assert row["status"] == "success"
    assert town.fleet.backends_of(WORKER).joinpath("engine-b", "run.sh").read_text().count("two")


async def test_an_operation_is_cancelled_on_one_node_and_retried_there(town: Town) -> None:
    town.warehouse.publish("engine-c", "one", megabytes=2)
    town.warehouse.proxy.bytes_per_second = 0.2 * MEGABYTE
    operation = town.fleet.request("install", "engine-c", [WORKER])
    app = town.app()
    async with app.run_test(size=(100, 30)) as pilot:
        await press(pilot, "o")
        await until(pilot, "the operation", lambda: "Install engine-c" in app.view.plain)
        await press(pilot, "\n")
        await until(pilot, "its node", lambda: f"◐ Downloading {WORKER}" in app.view.plain)
        await press(pilot, "jcy")
        await until(pilot, "it to be cancelled", lambda: f"⊘ Cancelled   {WORKER}" in app.view.plain)
        assert town.fleet.first.operation(operation["jobID"])["status"] == "cancelled"
        town.warehouse.calm()
        await press(pilot, "r")
        await pilot.press("escape")
        await until(pilot, "the retry to end", lambda: re.search(r"● Done +Install engine-c", app.view.plain))
        assert re.search(r"⊘ Cancelled +Install engine-c", app.view.plain), "what ended stays"


async def test_a_failure_needs_somebody_until_it_is_dismissed(town: Town) -> None:
    town.warehouse.publish("engine-d", "one", run=b"")
    uri = town.warehouse.proxy.reference("engine-d:absent")
    ended = town.fleet.ended(town.fleet.request("install", "broken", [WORKER], uri=uri))
    assert ended["status"] == "failed", ended
    app = town.app()
    async with app.run_test(size=(100, 30)) as pilot:
        await until(
            pilot, "the failure", lambda: f"Install broken: 0 of 1 done, 1 failed. {WORKER}: " in app.needs.plain
        )
        await pilot.press("tab", "enter")
        await until(pilot, "the reason in full", lambda: ended["nodes"][0]["error"] in " ".join(app.view.plain.split()))
        await press(pilot, "D")
        await until(pilot, "nothing to need anybody", lambda: "Nothing needs you." in seen(app))


async def test_a_model_that_is_wanted_where_no_node_is_is_said_to_need_somebody(town: Town) -> None:
    elsewhere = {"model_name": "tiny-chat", "node_selector": {"zone": "moon"}}
    town.fleet.first.post("/api/nodes/scheduling", elsewhere)
    app = town.app()
    async with app.run_test(size=(120, 30)) as pilot:
        await press(pilot, "m")
        await until(pilot, "the model", lambda: "tiny-chat " in app.view.plain)
        await press(pilot, "/tiny-chat\n")
        await press(pilot, "sx\n")
        await until(pilot, "the refusal", lambda: "cannot use 'x' as a number of replicas" in seen(app))
        await press(pilot, "s2\n")
        await until(pilot, "what is wanted", lambda: "0 of 2 replicas" in app.view.plain)
        await until(pilot, "the need", lambda: "tiny-chat cannot be " in app.needs.plain)
        await press(pilot, "\n")
        await until(pilot, "the explanation", lambda: "0 running, 2 wanted" in seen(app))
        await pilot.press("escape")
        await press(pilot, "s0\n")
        await until(pilot, "nothing to be wanted", lambda: "0 of 2 replicas" not in app.view.plain)
    wait_for("the schedule", lambda: town.fleet.first.get("/api/nodes/scheduling/tiny-chat")["min_replicas"] == 0)
