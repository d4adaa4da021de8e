"""Every state that an operator can meet, in both colours and on a phone: readable, usable, and honest."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect
from tests.window.states import HOSTILE, SCENES
from tests.window.watching import Watched

from enginehouse.api.pages import ROOT

Open = Callable[..., Watched]
PAGES = ("fleet", "operations", "backends", "models", "access", "settings")
SIZES = {"desk": (1280, 800), "phone": (360, 740), "wall": (2560, 1400)}


def look(opened: Open, states: str, scene: str, address: str = "#/fleet", **more: Any) -> Watched:
    watched = opened(**more)
    watched.page.goto(states.format(scene) + address)
    expect(watched.page.locator("#app main")).to_be_visible()
    return watched


def resized(watched: Watched, size: str) -> bool:
    """Whether everything fits the width after the window was resized."""
    width, height = SIZES[size]
    watched.page.set_viewport_size({"width": width, "height": height})
    fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    return bool(watched.page.evaluate(fits))


@pytest.mark.parametrize("scene", sorted(SCENES))
def test_no_state_needs_sideways_scrolling_and_each_says_what_is_so(opened: Open, states: str, scene: str) -> None:
    watched = look(opened, states, scene)
    watched.until("document.querySelector('#app main').innerText.trim().length > 10")
    assert [size for size in ("desk", "phone") if not resized(watched, size)] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_page_fits_a_phone_and_a_wall(opened: Open, states: str, page: str) -> None:
    watched = look(opened, states, "mixed", f"#/{page}")
    expect(watched.page.locator("h1").first).to_be_visible()
    assert [size for size in ("phone", "wall") if not resized(watched, size)] == []


@pytest.mark.parametrize(
    ("scene", "address"),
    [
        *((scene, "#/fleet") for scene in ("signed-out", "empty", "first-start", "mixed", "connection-lost")),
        *(("mixed", f"#/{page}") for page in (*PAGES[1:], "chat", "logs", "nodes/jetson")),
        ("mixed", "#/operations/00000001-0000-4000-8000-000000000000"),
    ],
)
def test_axe_finds_nothing_serious(opened: Open, states: str, axe: str, scene: str, address: str) -> None:
    """In both sets of colours."""
    watched = look(opened, states, scene, address, bypass_csp=True, height=1600)
    watched.until("!/Reading/.test(document.querySelector('#app main').innerText)")
    watched.page.add_script_tag(content=axe)
    for scheme in ("light", "dark"):
        watched.page.emulate_media(color_scheme=scheme)
        found = watched.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        serious = [
            f"{scheme}: {one['id']}: {one['help']}: {[part['html'][:160] for part in one['nodes'][:3]]}"
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
        ]
        assert serious == []


def test_what_needs_a_person_comes_first_with_the_button_that_helps(opened: Open, states: str) -> None:
    page = look(opened, states, "mixed").page
    needs = page.get_by_label("Needs you", exact=True).locator("li")
    expect(needs).to_have_count(7)
    texts = needs.all_inner_texts()
    assert "attic asks to join again: its address changed from 10.0.0.4 to 10.0.0.9" in texts[0]
    assert "shed-pi asks to join" in texts[1]
    assert "9f2c-55aa-01d1-77e0" in texts[1]
    assert "gemma does not stay up on dgx" in texts[2]
    assert "spare has 20.0 GiB of 900.0 GiB disk free" in texts[3]
    assert re.search(r"jetson has been offline for 3 h \d+ min; 1 request waits for it\.", texts[-1])
    expect(page.locator("h1")).to_contain_text("3 of 5 nodes are healthy. jetson has been offline for 3 h")
    expect(page.get_by_role("button", name="Approve all 2")).to_be_visible()


def test_partial_success_is_not_green_and_every_row_has_a_word(opened: Open, states: str) -> None:
    page = look(opened, states, "mixed", "#/operations").page
    partly = page.locator(".row", has_text="Install bark").locator(".pill")
    expect(partly).to_have_text("◪Partly")
    expect(partly).to_have_class("pill warn")
    page.goto(states.format("mixed") + "#/operations/00000001-0000-4000-8000-000000000000")
    expect(page.locator("h1")).to_have_text(
        "Upgrade llama-cpp: 1 of 5 done, 1 failed, 1 waits for jetson, 2 at work, 1 skipped."
    )
    words = page.locator(".noderow .pill").all_inner_texts()
    assert [word[1:].strip() for word in words] == [
        *("Done", "Downloading", "Queued", "Worker busy", "Failed"),
        "Skipped",
    ]
    busy = page.locator(".noderow", has_text="laptop")
    expect(busy).to_contain_text("it is still working. Nothing is sent twice.")
    expect(page.locator(".noderow", has_text="spare").get_by_role("button")).to_have_text(
        ["Retry on this node", "Copy"]
    )


def test_what_is_away_is_shown_as_last_known_and_what_is_unknown_as_unknown(opened: Open, states: str) -> None:
    page = look(opened, states, "mixed").page
    away = page.locator(".panel", has=page.get_by_role("link", name="jetson", exact=True))
    expect(away).to_contain_text(re.compile(r"last known 3 h \d+ min ago"))
    expect(away).to_contain_text("cuda12-llama-cpp 1.3")
    unknown = away.locator(".meter", has_text="CPU")
    expect(unknown.locator(".bar")).to_have_class("bar unknown")
    expect(unknown.locator(".amount")).to_have_text("\u2013")


def test_somebody_who_may_only_look_sees_everything_and_no_button_that_changes_anything(
    opened: Open, states: str
) -> None:
    page = look(opened, states, "read-only").page
    expect(page.locator(".panel")).to_have_count(5)
    expect(page.get_by_text("(read-only)")).to_be_visible()
    for address in ("fleet", "operations/00000001-0000-4000-8000-000000000000", "models", "backends", "nodes/desk"):
        page.goto(states.format("read-only") + f"#/{address}")
        expect(page.locator("h1").first).to_be_visible()
        verbs = (
            "Approve",
            "Deny",
            "Retry",
            "Cancel",
            "Drain",
            "Remove",
            "Add a",
            "Load",
            "Delete",
            "Upgrade",
            "Dismiss",
        )
        buttons = page.locator("main").get_by_role("button").all_inner_texts()
        assert [one for one in buttons if one.startswith(verbs)] == []
    plan = {"nodes": [{"node_id": "id-desk", "node_name": "desk", "node_status": "healthy", "does": "install"}]}
    page.route("**/api/operations/plan", lambda route: route.fulfill(json=plan))
    page.goto(states.format("read-only") + "#/backends?show=all")
    page.get_by_role("button", name="Which build?").first.click()
    drawer = page.get_by_role("dialog")
    expect(drawer.get_by_role("row", name="desk")).to_be_visible()
    assert drawer.get_by_role("button").all_inner_texts() == ["✕", "Close"]
    expect(drawer.get_by_role("checkbox")).to_have_count(0)


@pytest.mark.parametrize("address", ["fleet", "operations", "backends?show=all", "models", "logs", "nodes/id-box"])
def test_markup_escapes_and_turned_text_of_others_stay_text(opened: Open, states: str, address: str) -> None:
    """F-116. The fixture fails the test if a dialog opens, an image is fetched, or the policy was needed."""
    watched = look(opened, states, "hostile-names", f"#/{address}")
    page = watched.page
    expect(page.locator("h1").first).to_be_visible()
    watched.until("document.body.innerText.includes('<script>alert(2)</script>')")
    assert page.locator("#app img, #app script").count() == 0
    shown = page.inner_text("body")
    assert "\u202e" in HOSTILE
    assert "\u202e" not in shown
    assert "\x1b" not in shown
    links = page.eval_on_selector_all("a", "(all) => all.map((one) => one.getAttribute('href'))")
    assert [one for one in links if not one.startswith(("#", "/"))] == []


def test_a_lost_connection_is_said_and_the_last_state_stays(opened: Open, states: str) -> None:
    page = look(opened, states, "connection-lost").page
    expect(page.locator(".panel")).to_have_count(2)
    expect(page.locator(".fresh")).to_contain_text("reconnecting")
    expect(page.locator(".fresh")).to_contain_text("old")
    expect(page.locator("main")).to_contain_text("Nothing needed you")


def test_a_stream_that_is_not_allowed_is_not_asked_for_again_and_again(opened: Open, states: str) -> None:
    asked: list[str] = []
    watched = opened()
    watched.page.on("request", lambda request: asked.append(request.url) if "/api/events" in request.url else None)
    watched.page.goto(states.format("not-allowed"))
    expect(watched.page.locator(".fresh")).to_contain_text("not allowed")
    expect(watched.page.locator("main")).to_contain_text("it needs the role viewer")
    expect(watched.page.get_by_text("Reading the")).to_have_count(0)
    assert len(asked) == 1


def test_the_keyboard_alone_goes_everywhere(opened: Open, states: str) -> None:
    page = look(opened, states, "mixed").page
    expect(page.locator(".panel").first).to_be_visible()
    for key, name in (("o", "operations"), ("b", "backends"), ("m", "models"), ("s", "settings"), ("f", "fleet")):
        page.keyboard.press("g")
        page.keyboard.press(key)
        page.wait_for_url(f"**/#/{name}")
    page.keyboard.press("g")
    page.keyboard.press("o")
    search = page.get_by_label("Search operations")
    expect(search).to_be_visible()
    page.keyboard.press("/")
    expect(search).to_be_focused()
    page.keyboard.type("bark")
    expect(page.locator(".row")).to_have_count(1)
    search.evaluate("(one) => one.blur()")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/#/operations/00000003-*")
    # The address changes before the page does, and what is opened until then is closed with the page before.
    expect(page.get_by_role("heading", level=1)).to_contain_text("Install bark")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keys")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)


def test_a_dialog_holds_the_focus_and_gives_it_back(opened: Open, states: str) -> None:
    page = look(opened, states, "mixed").page
    button = page.get_by_role("button", name="Approve", exact=True).first
    button.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    for _ in range(8):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.closest('[role=dialog]') !== null")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(button).to_be_focused()


def test_an_action_that_is_refused_says_so_in_the_words_of_the_server(opened: Open, states: str) -> None:
    page = look(opened, states, "mixed").page
    page.get_by_role("button", name="Dismiss", exact=True).first.click()
    alert = page.locator(".message.bad")
    expect(alert).to_contain_text("cannot do this here: the catalogue of states only shows")
    expect(alert).to_contain_text("forbidden · r1")


def test_a_thousand_entries_are_a_window_of_some_rows(opened: Open, states: str) -> None:
    page = look(opened, states, "hundred-nodes", "#/backends?show=all").page
    expect(page.get_by_text("1,000 entries")).to_be_visible()
    assert page.locator(".offer").count() < 40
    page.locator(".window").evaluate("(one) => { one.scrollTop = one.scrollHeight }")
    expect(page.get_by_text("engine-0999")).to_be_visible()
    page.get_by_label("Search the catalogue").fill("engine-0500")
    expect(page.locator(".offer")).to_have_count(1)


def test_the_colours_are_remembered(opened: Open, states: str) -> None:
    page = look(opened, states, "healthy").page
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_no_file_of_the_page_parses_markup_or_runs_text(opened: Open, states: str) -> None:
    """One module touches elements, and it has no way to make them from text."""
    forbidden = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc")
    files = [path for path in ROOT.rglob("*.js")]
    assert len(files) > 30
    for path in files:
        text = path.read_text()
        assert [word for word in forbidden if word in text] == [], path.name
        assert text.count("\n") <= 300, path.name
