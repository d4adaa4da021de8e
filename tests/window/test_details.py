"""Small things that a person meets: what was typed, what lies over a page, pages on a phone, and what is summed up."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Route, expect
from tests.window.watching import Watched

Open = Callable[..., Watched]
Run = Callable[[str, str], Any]


def test_a_field_shows_what_the_page_says_also_when_a_person_has_typed_since(modules: Run) -> None:
    """A message that was sent at once, before anything else was drawn, stayed in its field."""
    found = modules(
        "dom.js",
        """const place = document.createElement("div");
        const draw = (value) => it.render(place, it.h("textarea", {value}));
        draw(""); place.firstChild.value = "sent"; draw("");
        const cleared = place.firstChild.value;
        place.firstChild.value = "7"; draw(7);
        return [cleared, place.firstChild.value];""",
    )
    assert found == ["", "7"]


def test_going_back_closes_what_lies_over_the_page(opened: Open, states: str) -> None:
    page = opened().page
    page.goto(states.format("mixed") + "#/operations")
    page.goto(states.format("mixed") + "#/fleet")
    page.get_by_role("button", name="Approve", exact=True).first.click()
    expect(page.get_by_role("dialog")).to_be_visible()
    page.go_back()
    expect(page.get_by_label("Search operations")).to_be_visible()
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_every_page_is_in_sight_on_a_phone(opened: Open, states: str) -> None:
    page = opened(width=360, height=740).page
    page.goto(states.format("mixed") + "#/fleet")
    pages = page.locator("nav[aria-label=Pages]")
    expect(pages.get_by_role("link", name="Models")).to_be_in_viewport(ratio=1)
    expect(pages.get_by_role("link", name="Settings")).to_be_hidden()
    pages.get_by_role("button", name="More").click()
    for name in ("Fleet", "Chat", "Logs", "Access", "Settings"):
        expect(pages.get_by_role("link", name=name)).to_be_in_viewport(ratio=1)
    expect(pages.get_by_role("button", name="Sign out")).to_be_in_viewport(ratio=1)
    pages.get_by_role("link", name="Settings").click()
    expect(page.locator("h1")).to_contain_text("setting")
    expect(pages.get_by_role("link", name="Chat")).to_be_hidden()


@pytest.mark.parametrize("address", ["backends?show=all", "settings", "access/audit"])
def test_no_word_lies_over_another_on_a_phone(opened: Open, states: str, address: str) -> None:
    record = {
        "id": "1",
        "at": "2026-01-01T00:00:00Z",
        "who": "admin",
        "role": "admin",
        "summary": "Add a model from sources, a configuration or files; with `load`, answers 202 with the operation.",
        "target": "a-model-of-some-length",
        "method": "PUT",
        "path": "/api/uploads/00c0ebc608d1cfc7c7ad6792de4de9792346aac50ca3459e91debcb6e2545412",
        "status": 202,
        "address": "127.0.0.1",
    }
    page = opened(width=360, height=740).page
    page.route("**/api/audit*", lambda route: route.fulfill(json={"audit": [record]}))
    page.goto(states.format("mixed") + f"#/{address}")
    expect(page.locator("td, .offer").first).to_be_visible()
    expect(page.locator("main")).not_to_contain_text("Reading")
    # Texts beside each other have at least some letters of room, and no line of a row leaves the row.
    narrow = page.evaluate(
        """() => [...document.querySelectorAll("td > *, .offer .text > *")]
          .filter((one) => one.innerText && one.innerText.length > 12 && one.clientWidth && one.clientWidth < 60)
          .map((one) => one.innerText)"""
    )
    assert narrow == []
    over = page.evaluate(
        """() => [...document.querySelectorAll(".offer")].filter((one) => {
          const row = one.getBoundingClientRect(), text = one.querySelector(".text").getBoundingClientRect();
          return text.top < row.top || text.bottom > row.bottom;
        }).map((one) => one.innerText)"""
    )
    assert over == []


OLD = {"kind": "install", "status": "succeeded", "author": "a", "createdAt": "2026-01-01T00:00:00Z", "counts": {}}
ROW = {"kind": "install_backend", "attempt": 1, "node_name": "a", "percentage": 50}


def test_an_amount_has_a_total_only_when_every_node_has_said_its_own(modules: Run) -> None:
    def amounts(*told: dict[str, Any]) -> list[list[str]]:
        return list(
            modules(
                "state.js",
                f"""const words = await import("/web/words.js");
                const state = it.emptyState();
                return {json.dumps(told)}.map((one, at) => {{
                  it.apply(state, "operation", {{jobID: "1", kind: "install", status: "running", revision: at,
                    createdAt: "", counts: {{}}, ...one}}, at);
                  const found = state.operations.get("1");
                  return [words.amountOf(found), words.timeLeft(found)];
                }});""",
            )
        )

    away = {**ROW, "intent": "b", "status": "queued"}
    first = {**ROW, "intent": "a", "status": "downloading", "total_bytes": 2048, "current_bytes": 1024}
    half = {"nodes": [first, away], "currentBytes": 1024, "totalBytes": 2048}
    more = {"nodes": [{**first, "current_bytes": 2047}, away], "currentBytes": 2047, "totalBytes": 2048}
    both = {"nodes": [first, {**first, "intent": "b"}], "currentBytes": 2048, "totalBytes": 4096}
    assert amounts(half, more, both) == [
        ["1.0 KiB so far", ""],
        ["2.0 KiB so far", ""],
        ["2.0 of 4.0 KiB", "0:03 left"],
    ]


def test_an_answer_for_filters_that_were_changed_since_is_not_shown(opened: Open, states: str) -> None:
    page = opened().page
    late: list[Route] = []

    def answer(route: Route) -> None:
        if "limit=100" not in route.request.url:
            route.continue_()
        elif "status=failed" in route.request.url:
            route.fulfill(json={"operations": []})
        else:
            late.append(route)

    page.route("**/api/operations?*", answer)
    with page.expect_request("**/api/operations?*limit=100"):
        page.goto(states.format("mixed") + "#/operations")
    with page.expect_response("**/api/operations?*status=failed"):
        page.get_by_label("Filter by status").select_option("failed")
    old = {**OLD, "jobID": "9", "name": "of-another-filter"}
    with page.expect_response("**/api/operations?all=true&rows=false&limit=100") as answered:
        late[0].fulfill(json={"operations": [old]})
    answered.value.finished()
    # What came of it is drawn with the next frames.
    page.evaluate("async () => { for (let n = 0; n < 5; n += 1) await new Promise(requestAnimationFrame) }")
    assert "of-another-filter" not in page.inner_text("main")


def test_what_happened_on_each_node_is_told_in_its_order(opened: Open, states: str) -> None:
    rows = [
        {"node_name": "b", "startedAt": "2026-01-01T00:00:01Z", "finishedAt": "2026-01-01T00:01:09Z"},
        {"node_name": "a", "startedAt": "2026-01-01T00:00:02Z"},
    ]
    operation = {
        "jobID": "7",
        "kind": "install",
        "name": "tool",
        "status": "running",
        "author": "admin",
        "createdAt": "2026-01-01T00:00:00Z",
        "counts": {"success": 1, "downloading": 1},
        "nodes": [
            {**ROW, **rows[0], "node_id": "b", "intent": "b", "status": "success", "action": "install tool"},
            {**ROW, **rows[1], "node_id": "a", "intent": "a", "status": "downloading", "action": "install tool"},
        ],
    }
    page = opened().page
    page.route("**/api/operations/7", lambda route: route.fulfill(json=operation))
    page.goto(states.format("mixed") + "#/operations/7")
    moments = page.locator(".moments li")
    expect(moments).to_have_count(4)
    told = [text.split("\n")[-1].strip() for text in moments.all_inner_texts()]
    assert told == ["Asked by admin.", "b began.", "a began.", "b: done."]
    expect(moments.last.locator("time")).to_have_text("+1:09")
    expect(page.locator(".noderow", has_text="Done")).to_contain_text("took 1 min")


def test_what_has_ended_stays_in_the_strip_for_a_moment_and_says_how(opened: Open, states: str) -> None:
    page = opened().page
    page.goto(states.format("mixed") + "#/settings")
    strip = page.get_by_label("Running operations")
    running = strip.locator("a.running").first
    expect(running).to_be_visible()
    name = running.locator(".name").inner_text()
    page.evaluate(
        """async (name) => {
          const [live, state] = [await import("/web/live.js"), await import("/web/state.js")];
          const [one] = [...live.state.operations.values()].filter((one) => name.endsWith(one.name) && !one.finishedAt);
          const nodes = one.nodes.map((row, at) => ({...row, status: at ? "success" : "error"}));
          state.putOperation(live.state, {...one, status: "partial", nodes, revision: 1e6}, Date.now() / 1000);
          live.changed(true);
        }""",
        name,
    )
    ended = strip.locator("a.ended", has_text=name)
    expect(ended.locator(".pill.warn")).to_have_text("◪Partly")
    expect(ended).to_have_count(0, timeout=15_000)


def test_the_log_of_a_worker_and_of_the_server_are_a_step_away(opened: Open, states: str) -> None:
    page = opened().page
    line = {"timestamp": "2026-01-01T00:00:00Z", "stream": "worker", "text": "worker.started <b>here</b>"}
    for path in ("nodes/desk/worker-log", "logs/frontend"):
        page.route(f"**/api/{path}*", lambda route: route.fulfill(json=[line]))
    page.goto(states.format("mixed") + "#/logs")
    page.get_by_role("link", name="Worker on desk").click()
    expect(page.locator("h1")).to_have_text("Log of the worker on desk")
    expect(page.get_by_role("log")).to_contain_text("worker.started <b>here</b>")
    page.go_back()
    page.get_by_role("link", name="The server that answers here").click()
    expect(page.get_by_role("log")).to_contain_text("worker.started <b>here</b>")


def test_where_no_stream_comes_through_the_lists_are_read(opened: Open, states: str) -> None:
    """A proxy that holds the stream back."""
    page = opened().page
    page.clock.install()

    def held(route: Route) -> None:
        """Never answered."""

    page.route("**/api/events", held)
    page.goto(states.format("mixed") + "#/fleet")
    expect(page.locator(".fresh")).to_contain_text("connecting")
    page.clock.run_for(13_000)
    expect(page.locator(".panel")).to_have_count(5)
    expect(page.locator(".fresh")).to_contain_text("reconnecting")
    expect(page.locator(".fresh")).to_contain_text("old")


def test_on_a_wall_the_list_stays_beside_the_operation(opened: Open, states: str) -> None:
    page = opened(width=2560, height=1400).page
    page.goto(states.format("mixed") + "#/operations")
    page.locator("a.row", has_text="Install bark").click()
    expect(page.locator("h1")).to_contain_text("Install bark")
    expect(page.locator("aside a.row[aria-current]")).to_contain_text("Install bark")
    expect(page.locator("aside a.row")).not_to_have_count(1)


def test_the_figures_of_what_is_new_grow_with_the_others(opened: Open, states: str) -> None:
    """A machine that joined, and a model that is used, since the page was opened."""
    found = opened()
    found.page.goto(states.format("mixed") + "#/nodes/desk")
    expect(found.page.locator(".plot").first).to_be_visible()
    grown = found.page.evaluate(
        """async () => {
          const [live, history] = [await import("/web/live.js"), await import("/web/history.js")];
          live.state.nodes.set("new", {id: "new", health: "healthy", total_ram: 100});
          live.state.vitals.set("new", {available_ram: 40, used_cores: 1.5});
          live.state.modelTraffic.set("fresh", {requests_per_second: 2, time_to_first_token_seconds: 0.5});
          const before = history.known();
          live.state.ahead += before.step_seconds;
          live.changed(true);
          await new Promise((done) => setTimeout(done, 200));
          const now = history.known();
          return [now.nodes.new.used_ram, now.models.fresh.requests_per_second, now.series.queued].map(
            (line) => [line.length, line.at(-1)]);
        }"""
    )
    assert [length for length, _ in grown] == [360, 360, 360]
    assert [last for _, last in grown[:2]] == [60, 2]
