"""The view as a function of what arrives: pages, keys, dialogs, strange texts, any size. The cluster is played."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest
from tests.cli.terminal.shapes import JOB, model, node, operation, row
from tests.cli.terminal.top.real import seen, until

from enginehouse.cli.terminal.fleet_state import Arrival, ListName
from enginehouse.cli.terminal.top.app import TopApp
from enginehouse.core.errors import Denied, EnginehouseError

NASTY = "[red]x[/]\x1b[31mred\x1b[0m\u202eltr\u200f\nnext\x07 [@click=app.quit]y[/]"
TAMED = "[red]x[/][31mred[0mltr next [@click=app.quit]y[/]"


NARROWEST = 76  # below that, the right ends of rows are cut


class Played:
    """A cluster with these nodes that answers every request alike."""

    url = "http://played"

    def __init__(self, *nodes: dict[str, Any], answer: object = None) -> None:
        self.requests: list[tuple[str, str, object]] = []
        self._nodes = list(nodes)
        self._answer = answer
        self._take: Callable[[Arrival], None] = lambda arrived: None

    def start(self, take: Callable[[Arrival], None]) -> None:
        self._take = take
        take(Arrival("connected", time.monotonic()))

    def stop(self) -> None:
        pass

    def heard_at(self) -> float | None:
        return time.monotonic()

    def read(self, names: Iterable[ListName]) -> None:
        now = time.monotonic()
        answers: dict[ListName, object] = {"nodes": self._nodes, "operations": {}, "upgrades": {}}
        for name in names:
            self._take(Arrival("list", now, name, answers.get(name, []), now))

    def request(self, method: str, path: str, body: object = None) -> object:
        self.requests.append((method, path, body))
        if isinstance(self._answer, EnginehouseError):
            raise self._answer
        return self._answer

    def tell(self, kind: str, body: object) -> None:
        self._take(Arrival("event", time.monotonic(), kind, msgspec.json.encode(body)))


async def test_names_and_errors_of_others_are_plain_text_on_every_page() -> None:
    desk = {**node("desk"), "name": NASTY, "labels": {"zone": NASTY}, "platform": NASTY}
    played = Played(desk, node("pending", approved=False, waits_for=NASTY))
    app = TopApp(played)
    async with app.run_test(size=(200, 50)) as pilot:
        await until(pilot, "the node", lambda: TAMED in app.view.plain)
        assert TAMED in app.needs.plain
        played.tell("operation", operation("failed", row(NASTY, "error", error=NASTY), name=NASTY))
        played.tell("model", {**model("m", "desk"), "name": NASTY})
        await until(
            pilot,
            "the failure",
            lambda: f"Install {TAMED}: 0 of 1 done, 1 failed. {TAMED}: {TAMED}"[:100] in app.needs.plain,
        )
        for keys in (["enter"], ["o"], ["enter"], ["m"]):
            await pilot.press(*keys)
            await until(pilot, "the text", lambda: TAMED in app.view.plain)
            shown = seen(app)
            assert "\x1b" not in shown
            assert "\u202e" not in shown
            assert "\u200f" not in shown
    assert app.return_value is None, "no markup of a name was an action"


async def test_what_the_frontend_refuses_is_said_in_its_words() -> None:
    sentence = "cannot drain a node with this token: it has the role `viewer`; use one with the role `admin`"
    played = Played(node("desk"), answer=Denied(sentence))
    app = TopApp(played)
    async with app.run_test(size=(140, 30)) as pilot:
        await until(pilot, "the node", lambda: "desk" in app.view.plain)
        await pilot.press("d", "y")
        await until(pilot, "the refusal", lambda: sentence in seen(app))
    assert played.requests == [("POST", "/api/nodes/id-of-desk/drain", None)]


@pytest.mark.parametrize("size", [(80, 24), (140, 40), (40, 12)])
async def test_everything_fits_at_every_size(size: tuple[int, int]) -> None:
    nodes = [node(f"node-{number:02d}", gpu_vendor="nvidia", total_vram=12 * 1024**3) for number in range(30)]
    played = Played(*nodes, node("new", approved=False))
    app = TopApp(played)
    async with app.run_test(size=size) as pilot:
        await until(pilot, "the nodes", lambda: "node-00" in app.view.plain)
        played.tell("operation", operation("running", *(row(f"node-{number:02d}") for number in range(30))))
        played.tell("operation", operation("failed", error="no " * 200, jobID="failed"))
        await until(pilot, "the failure", lambda: len(app.needs.rows) == 2)
        for key in ("f", "enter", "escape", "o", "enter", "escape", "b", "m", "question_mark", "escape"):
            await pilot.press(key)
            await pilot.pause()
            for listed in (app.needs, app.view):
                assert listed.size.height >= 1
                widest = max(map(len, listed.plain.splitlines()), default=0)
                assert widest <= max(size[0], NARROWEST) - 2, (key, listed.id)
            assert app.screen_stack[0].query_one("#foot").region.bottom <= size[1]
        await pilot.resize_terminal(100, 30)
        await until(pilot, "the other size", lambda: app.view.size.width == 100)


async def test_a_thousand_nodes_are_drawn_only_where_they_are_seen() -> None:
    played = Played(*(node(f"node-{number:04d}") for number in range(1000)))
    app = TopApp(played)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, "the nodes", lambda: len(app.view.rows) == 1000)
        await pilot.press("end")
        assert app.view.target.id == "id-of-node-0999"
        assert app.view.scroll_offset.y == 3000 - app.view.size.height
        began = time.process_time()
        for _ in range(10):
            app.draw()
        assert (time.process_time() - began) / 10 < 0.1
        await pilot.press("slash", *"0500", "enter")
        assert [one.target.id for one in app.view.rows] == ["id-of-node-0500"]


async def test_the_cursor_stays_on_what_it_is_about() -> None:
    played = Played(node("a"), node("c"))
    app = TopApp(played)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, "the nodes", lambda: len(app.view.rows) == 2)
        await pilot.press("j")
        assert app.view.target.id == "id-of-c"
        played.tell("node", node("b"))
        await until(pilot, "the new one", lambda: len(app.view.rows) == 3)
        assert app.view.target.id == "id-of-c"
        played.tell("node-removed", {"id": "id-of-c"})
        await until(pilot, "it to be gone", lambda: len(app.view.rows) == 2)
        assert app.view.target.id == "id-of-b"


async def test_past_the_top_of_a_list_is_what_needs_a_person() -> None:
    played = Played(node("a"), node("new", approved=False), node("newer", approved=False), answer={})
    app = TopApp(played)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, "the nodes", lambda: len(app.needs.rows) == 2)
        await pilot.press("k")
        assert app.focused is app.needs
        await pilot.press("j", "a")
        await until(pilot, "the question", lambda: "Approve newer?" in seen(app))
        await pilot.press("y")
        await until(pilot, "the request", lambda: played.requests)
        assert played.requests == [("POST", "/api/nodes/id-of-newer/approve", None)]
        await pilot.press("j", "k", "j")
        assert app.focused is app.view
        await pilot.press("tab", "enter")
        await until(pilot, "the details", lambda: "fingerprint" in app.view.plain)
        await pilot.press("escape")
        await until(pilot, "the list", lambda: "fingerprint" not in app.view.plain)


async def test_keys_that_mean_nothing_here_say_what_would() -> None:
    played = Played(node("desk"))
    app = TopApp(played)
    async with app.run_test(size=(120, 30)) as pilot:
        await until(pilot, "the node", lambda: "desk" in app.view.plain)
        await pilot.press("u")
        await until(pilot, "the keys of a node", lambda: "u does nothing to a node (a approve" in seen(app))
        await pilot.press("a")
        await until(pilot, "the reason", lambda: "desk is approved already." in seen(app))
        await pilot.press("g", "c")
        await until(pilot, "the place", lambda: "The chat page is only in the browser: http://played" in seen(app))
    assert played.requests == []


async def test_an_operation_shows_every_node_with_its_pill_and_the_reason_in_full() -> None:
    reason = "cannot read https://example.org/" + "x" * 150 + ": the connection was refused"
    rows = [
        row("a", "queued", state="accepted"),
        row("b", phase="downloading", current_bytes=1024, total_bytes=4096, percentage=25.0, file_name="layer"),
        row("c", phase="extracting"),
        row("d", "running_on_worker", error="no progress for 130 s; it may still be running there"),
        row("e", "success"),
        row("f", "error", error=reason, attempt=10),
        row("g", "cancelled"),
        row("h", "queued", state="waiting", error="cannot reach it", attempt=3, due_in_seconds=42.0),
        row("i", "queued", state="waiting", reason="node_away"),
        row("j", kind="stop_replica", action="stop tiny"),
    ]
    excluded = [{"node_id": "z", "node_name": "z", "reason": "no build for linux/arm64"}]
    played = Played(node("a"))
    app = TopApp(played)
    async with app.run_test(size=(110, 50)) as pilot:
        played.tell("operation", operation("running", *rows, excluded=excluded, revision=1))
        await pilot.press("o")
        await until(pilot, "the operation", lambda: "Install llama-cpp" in app.view.plain)
        await pilot.press("enter")
        await until(pilot, "the rows", lambda: "Skipped" in app.view.plain)
        shown = app.view.plain
        for pill in (
            *("○ Queued      a", "◐ Downloading b", "◑ Installing  c", "◔ Worker busy d", "● Done        e"),
            *("✕ Failed      f", "⊘ Cancelled   g", "○ Queued      h", "◑ Working     j"),
        ):
            assert pill in shown
        assert "1.0 of 4.0 KiB" in shown
        assert " 25 %" in shown
        assert reason.replace(" ", "") in "".join(shown.split())
        assert "The worker has not answered for 130 s; it is still working. Nothing is sent twice." in shown
        assert "cannot reach it; attempt 3; next try in 42 s" in shown
        assert "waits for i, which is offline" in shown
        assert "no build for linux/arm64" in shown
        await pilot.press("j", "j", "c")
        await until(pilot, "the question", lambda: "Cancel: Install llama-cpp on b" in seen(app))
        await pilot.press("y")
        await until(pilot, "the request", lambda: played.requests)
    assert played.requests == [("POST", f"/api/operations/{JOB}/cancel", {"node": "b"})]


def test_a_fault_of_the_program_shows_no_values() -> None:
    app = TopApp(Played())
    try:
        token = "secret-" + "token"
        raise ValueError(len(token))
    except ValueError:
        app._fatal_error()
    with app.console.capture() as captured:
        for part in app._exit_renderables:
            app.console.print(part)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", captured.get())
    assert "ValueError: 12" in shown
    assert "secret-token" not in shown
