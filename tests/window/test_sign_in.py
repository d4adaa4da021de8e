"""People who come and go at one browser: links pasted into open tabs, other tabs, and nothing left for the next one."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import expect
from tests.fleet.cluster import Fleet
from tests.window.watching import Watched

Open = Callable[..., Watched]


def test_a_login_link_works_in_a_tab_that_shows_the_way_in(opened: Open, fleet: Fleet) -> None:
    """A browser does not load a page anew when only what is behind the `#` changes."""
    code = fleet.first.post("/api/session/links", {"role": "admin"})["code"]
    page = opened().page
    page.goto(fleet.first.url)
    expect(page.get_by_role("button", name="Sign in")).to_be_visible()
    page.evaluate(f"location.hash = '#/login/{code}'")
    expect(page.locator(".panel").first).to_be_visible()
    assert code not in page.url


def test_a_login_link_in_a_signed_in_tab_changes_who_is_here_or_says_why_not(signed_in: Open, fleet: Fleet) -> None:
    page = signed_in().page
    code = fleet.first.post("/api/session/links", {"role": "viewer"})["code"]
    page.evaluate(f"location.hash = '#/login/{code}'")
    expect(page.locator(".who")).to_contain_text("(read-only)")
    page.evaluate(f"location.hash = '#/login/{code}'")
    expect(page.get_by_role("alert")).to_contain_text("was used already")
    expect(page.locator(".who")).to_contain_text("(read-only)")
    page.goto("about:blank")
    page.goto(f"{fleet.first.url}/#/login/{code}")
    expect(page.get_by_role("alert")).to_contain_text("was used already")
    expect(page.locator(".panel").first).to_be_visible()
    assert code not in page.url


def test_nothing_of_one_person_is_left_for_the_next(signed_in: Open, fleet: Fleet) -> None:
    made = fleet.first.post("/api/tokens", {"name": "visitor", "role": "admin"})
    page = signed_in().page
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Or sign in with a token").fill(made["token"])
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator(".who")).to_contain_text("visitor")
    page.goto(f"{fleet.first.url}/#/chat")
    page.get_by_label("Your message").fill("a question of mine")
    page.get_by_label("Your message").press("Enter")
    expect(page.get_by_role("log")).to_contain_text("a question of mine")
    page.get_by_label("Your message").fill("a draft of mine")
    page.get_by_role("button", name="As curl or Python").click()
    expect(page.get_by_role("dialog")).to_contain_text("a draft of mine")
    fleet.first.delete("/api/tokens/visitor")
    expect(page.get_by_role("button", name="Sign in")).to_be_visible()
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.get_by_label("Or sign in with a token").fill(fleet.tokens["admin"])
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator(".who")).to_contain_text("admin")
    expect(page.get_by_label("Your message")).to_have_value("")
    expect(page.get_by_role("log")).not_to_contain_text("a question of mine")
