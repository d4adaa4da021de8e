"""Lists that could not be read: the page says nothing about what it does not know, and reads them again."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from playwright.sync_api import Route, expect
from tests.window.states import SCENES
from tests.window.watching import Watched

Open = Callable[..., Watched]


def test_a_list_that_was_refused_is_read_again_and_is_not_called_empty(opened: Open, states: str) -> None:
    page = opened().page
    refusing = True

    def away(route: Route) -> None:
        if refusing:
            route.fulfill(status=503, json={"error": {"message": "cannot answer: the database is away", "code": "x"}})
        else:
            route.continue_()

    page.route("**/api/nodes", away)
    page.route("**/api/models", away)
    with page.expect_response("**/api/models"):
        page.goto(states.format("mixed") + "#/fleet")
    expect(page.locator(".fresh")).to_contain_text("live")
    expect(page.locator(".truth")).to_contain_text("reading the fleet")
    expect(page.locator(".truth")).not_to_contain_text("0 replicas")
    expect(page.locator("main")).not_to_contain_text("No machine has joined")
    refusing = False
    expect(page.locator(".truth")).to_contain_text("3 of 5 nodes healthy")
    expect(page.locator("h1")).to_contain_text("3 of 5 nodes are healthy")


def test_a_server_that_does_not_answer_yet_is_asked_again(opened: Open, states: str) -> None:
    page = opened().page
    refusing = True
    page.route(
        "**/api/session",
        lambda route: route.fulfill(status=502, body="bad gateway") if refusing else route.continue_(),
    )
    page.goto(states.format("mixed") + "#/fleet")
    expect(page.get_by_role("alert")).to_contain_text("the server answered 502")
    refusing = False
    expect(page.locator("nav[aria-label=Pages]")).to_be_visible()


def test_who_signed_in_with_another_tab_is_in_when_they_look(opened: Open, states: str) -> None:
    page = opened().page
    page.route("**/api/session", lambda route: route.fulfill(status=401, json={"error": {"message": "no"}}))
    page.goto(states.format("mixed") + "#/models")
    expect(page.get_by_role("button", name="Sign in")).to_be_visible()
    page.unroute("**/api/session")
    page.evaluate("window.dispatchEvent(new Event('focus'))")
    expect(page.locator("nav[aria-label=Pages]")).to_be_visible()
    assert page.url.endswith("#/models")


def test_a_model_that_is_listed_but_cannot_be_shown_says_why(opened: Open, states: str) -> None:
    page = opened().page
    refusal = {"error": {"message": "cannot show it: the database is away", "code": "unavailable"}}
    page.route("**/api/models/*", lambda route: route.fulfill(status=503, json=refusal))
    page.goto(states.format("mixed") + "#/models/qwen")
    expect(page.locator("main")).to_contain_text("cannot show it: the database is away")


def test_a_model_with_the_longest_name_fits_a_phone(opened: Open, states: str) -> None:
    page = opened(width=360, height=740).page

    listed = msgspec.to_builtins(SCENES["mixed"]().models)
    listed[0]["name"] = "m" * 255
    page.route("**/api/models", lambda route: route.fulfill(json=listed))
    page.goto(states.format("mixed") + f"#/chat?model={'m' * 255}")
    expect(page.locator("option", has_text="m" * 255)).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
