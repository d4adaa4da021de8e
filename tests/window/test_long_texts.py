"""Long answers and logs: the page goes on answering the person, and no line is lost or shown twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Route, expect
from tests.window.watching import Watched

Open = Callable[..., Watched]
# How many milliseconds the next three drawings take, while nothing changes.
DRAWINGS = """import('/web/live.js').then((live) => new Promise((resolve) => {
  let [count, longest] = [0, 0];
  new PerformanceObserver((list) => {
    for (const one of list.getEntries()) longest = Math.max(longest, one.duration);
  }).observe({ entryTypes: ['longtask'] });
  live.subscribe(() => { if (++count === 4) resolve(longest); });
}))"""


@pytest.mark.parametrize(
    "text", ["```\n```\n" * 50_000, "[" * 200_000, "**a " * 50_000, "- a\n" * 50_000], ids=lambda text: repr(text[:8])
)
def test_markdown_takes_time_by_its_length_and_not_by_its_square(modules: Callable[..., Any], text: str) -> None:
    milliseconds = modules(
        "markdown.js",
        f"const text = {json.dumps(text)}; const began = performance.now(); it.markdown(text);"
        "return performance.now() - began;",
    )
    assert milliseconds < 2000


def test_an_answer_that_stands_costs_nothing_more(opened: Open, states: str) -> None:
    page = opened().page
    text = "- **one** `two`\n" * 3_500
    events = [{"choices": [{"delta": {"content": text}}]}, {"choices": [{"delta": {"content": "- the end"}}]}]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.goto(states.format("mixed") + "#/chat")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    page.get_by_label("Your message").fill("a long list")
    page.get_by_label("Your message").press("Enter")
    expect(page.locator(".theirs li")).to_have_count(3_501)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.evaluate(DRAWINGS)  # those that were still to come
    assert page.evaluate(DRAWINGS) < 60


def test_an_answer_of_a_book_is_shown_as_it_is(opened: Open, states: str) -> None:
    page = opened().page
    text = "- one\n" * 40_000
    body = f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.goto(states.format("mixed") + "#/chat")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    page.get_by_label("Your message").fill("a book")
    page.get_by_label("Your message").press("Enter")
    expect(page.locator(".theirs .plain-text")).to_contain_text("- one")
    expect(page.locator(".theirs li")).to_have_count(0)


def line(at: int, text: str) -> dict[str, str]:
    return {"timestamp": f"2026-01-01T00:00:{at:02}Z", "stream": "stderr", "text": text}


def test_what_an_engine_logs_while_the_page_connects_is_shown_once(opened: Open, states: str) -> None:
    """Two lines of one moment are two; those that both answers have are one."""
    page = opened().page
    first = [line(1, "a"), line(2, "b"), line(2, "b2")]
    streams = [[*first, line(2, "c"), line(3, "d"), line(3, "d")], [line(3, "d"), line(4, "e"), line(5, "f")]]

    def answer(route: Route) -> None:
        if "follow" not in route.request.url:
            route.fulfill(json=first)
            return
        lines = streams.pop(0) if streams else []
        # As a worker does: of those before the connection as many as were asked for.
        lines = lines if "lines=500" in route.request.url else lines[-1:]
        body = "".join(f"data: {json.dumps(one)}\n\n" for one in lines)
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/api/nodes/desk/logs/**", answer)
    page.goto(states.format("mixed") + "#/logs/desk/qwen")
    expect(page.locator(".logline span")).to_have_text(["a", "b", "b2", "c", "d", "d", "e", "f"])


def test_a_full_log_is_drawn_only_where_it_changed(opened: Open, states: str) -> None:
    page = opened().page
    streams = [[line(7, f"line {at}") for at in range(2_100)], [line(8, "the newest")]]

    def answer(route: Route) -> None:
        lines = streams.pop(0) if "follow" in route.request.url and streams else []
        body = "".join(f"data: {json.dumps(one)}\n\n" for one in lines)
        route.fulfill(content_type="text/event-stream", body=body) if lines else route.fulfill(json=[])

    page.route("**/api/nodes/desk/logs/**", answer)
    page.goto(states.format("mixed") + "#/logs/desk/qwen")
    expect(page.locator(".logline span").last).to_have_text("line 2099")
    expect(page.locator(".logline")).to_have_count(2_000)
    page.evaluate("window.some = document.querySelectorAll('.logline')[500]")
    before = page.evaluate("window.some.innerText")
    expect(page.locator(".logline span").last).to_have_text("the newest")
    assert page.evaluate("window.some.innerText") == before
