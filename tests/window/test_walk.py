"""A person at the page of a real fleet: two frontends, three machines, real engines, and what goes wrong meanwhile."""

from __future__ import annotations

import base64
import hashlib
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, expect
from tests.e2e.conftest import wait_for
from tests.fleet.cluster import Fleet
from tests.fleet.engines import program
from tests.fleet.proxies import balanced
from tests.fleet.warehouse import Warehouse
from tests.window.watching import Watched

import enginehouse
from enginehouse.link.client import RawBody

LONG_MS = 90_000
DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
TINY = Path(enginehouse.__file__).parent / "gallery" / "tiny-chat-2m-q8_0.gguf"
Open = Callable[..., Watched]


def test_a_stranger_is_told_what_this_is_and_how_to_get_in(opened: Open, fleet: Fleet) -> None:
    page = opened().page
    page.goto(fleet.first.url)
    expect(page.get_by_text("This server turns a set of machines into one OpenAI-compatible")).to_be_visible()
    expect(page.get_by_text("enginehouse login-link")).to_be_visible()
    page.get_by_label("Or sign in with a token").fill("eh-admin-wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("cannot")
    page.get_by_label("Or sign in with a token").fill(fleet.tokens["admin"])
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator(".panel").first).to_be_visible()


def test_a_login_link_works_once_and_leaves_no_trace_in_the_address(opened: Open, fleet: Fleet) -> None:
    code = fleet.first.post("/api/session/links", {"role": "admin"})["code"]
    first, second = opened(), opened()
    first.page.goto(f"{fleet.first.url}/#/login/{code}")
    expect(first.page.locator(".panel").first).to_be_visible()
    assert code not in first.page.url
    cookies = first.page.context.cookies()
    assert [(one["httpOnly"], one["sameSite"]) for one in cookies] == [(True, "Strict")]
    assert first.page.evaluate("document.cookie") == ""
    second.page.goto(f"{fleet.first.url}/#/login/{code}")
    expect(second.page.get_by_role("alert")).to_be_visible()
    expect(second.page.get_by_role("button", name="Sign in")).to_be_visible()
    first.page.get_by_role("button", name="Sign out").click()
    expect(first.page.get_by_role("button", name="Sign in")).to_be_visible()
    first.page.reload()
    expect(first.page.get_by_role("button", name="Sign in")).to_be_visible()


def test_a_machine_that_asks_to_join_is_approved_and_removed(signed_in: Open, fleet: Fleet) -> None:
    page = signed_in().page
    fleet.add_worker("shed", fleet.first, approve=False)
    needs = page.get_by_label("Needs you", exact=True)
    expect(needs).to_contain_text("shed asks to join", timeout=LONG_MS)
    needs.get_by_role("button", name="Approve").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(fleet.node("shed")["fingerprint"])
    dialog.get_by_role("button", name="Approve shed").click()
    panel = page.locator(".panel", has=page.get_by_role("link", name="shed", exact=True))
    expect(panel).to_contain_text("healthy", timeout=LONG_MS)
    fleet.workers.pop("shed").stop()
    expect(panel).to_contain_text("offline", timeout=LONG_MS)
    panel.get_by_role("button", name="Actions for shed").click()
    page.get_by_role("menuitem", name="Remove…").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove shed").click()
    expect(panel).to_have_count(0, timeout=LONG_MS)


def test_the_line_for_a_machine_has_no_token_and_the_digest_is_that_of_the_script(
    signed_in: Open, fleet: Fleet
) -> None:
    page = signed_in().page
    page.get_by_role("button", name="Add a machine").first.click()
    dialog = page.get_by_role("dialog")
    line, token = dialog.locator("pre.line").nth(0), dialog.locator("pre.line").nth(1)
    dialog.get_by_label("Name of the machine").fill("two words")
    expect(line).to_contain_text(f"curl -fsS {fleet.first.url}/join.sh | sh -s -- {fleet.first.url} --name 'two words'")
    secret = token.inner_text().strip()
    assert secret.startswith("eh-join-")
    assert secret not in line.inner_text()
    with urllib.request.urlopen(f"{fleet.first.url}/join.sh") as answer:
        expect(dialog).to_contain_text(hashlib.sha256(answer.read()).hexdigest())


def test_an_install_on_three_machines_one_frozen_and_one_that_cannot(
    signed_in: Open, fleet: Fleet, warehouse: Warehouse
) -> None:
    """Rows change by themselves, a failure stays with its reason, and one node is retried alone."""
    warehouse.publish("tool", "one", megabytes=6)
    warehouse.proxy.bytes_per_second = 1_500_000
    page = signed_in().page
    page.goto(f"{fleet.first.url}/#/backends?q=tool")
    page.get_by_role("button", name="Plan the install of tool").click()
    drawer = page.get_by_role("dialog")
    expect(drawer.locator("tbody tr")).to_have_count(3)
    expect(drawer).to_contain_text("3 nodes would change")
    drawer.get_by_role("button", name="Install on 3 nodes").click()
    follow(page, "Install of lab@tool was accepted.")
    rows = {name: page.locator(".noderow", has_text=name) for name in ("worker-1", "worker-2", "worker-3")}
    expect(rows["worker-2"]).to_contain_text("Downloading", timeout=LONG_MS)
    fleet.workers["worker-2"].pause()
    widths = watch_widths(page)
    expect(rows["worker-3"]).to_contain_text("Failed", timeout=LONG_MS)
    expect(rows["worker-1"]).to_contain_text("Done", timeout=LONG_MS)
    # A frozen machine sends no heartbeats: it is away, and said to be.
    expect(rows["worker-2"]).to_contain_text("starts when the node reconnects", timeout=LONG_MS)
    expect(page.locator("h1")).to_contain_text("1 of 3 done, 1 failed, 1 waits for worker-2")
    fleet.workers["worker-2"].resume()
    expect(rows["worker-2"]).to_contain_text("Done", timeout=LONG_MS)
    expect(page.locator(".total .pill")).to_have_text("◪Partly")
    seen = widths()
    assert seen == sorted(seen), "the bar of all nodes went back"
    assert seen, "no progress was seen"

    fleet.workers["worker-3"].again(ENGINEHOUSE_ARCHIVE_LIMIT="1GB")
    fleet.until_healthy("worker-3")
    page.goto(f"{fleet.first.url}/#/fleet")
    expect(page.get_by_label("Needs you", exact=True)).to_contain_text("Install tool: 2 of 3 done, 1 failed")
    page.go_back()
    rows["worker-3"].get_by_role("button", name="Retry on this node").click()
    follow(page, "Install tool is tried again on worker-3.")
    expect(page.locator("h1")).to_have_text("Install tool: 1 of 1 done.", timeout=LONG_MS)
    page.goto(f"{fleet.first.url}/#/fleet")
    expect(page.get_by_text("Nothing needs you.")).to_be_visible()


def follow(page: Page, said: str) -> None:
    """Opens the operation that a message is about."""
    page.locator(".message", has_text=said).get_by_role("link", name="Show the operation").click()


def watch_widths(page: Page) -> Callable[[], list[float]]:
    """Records how far the bar of all nodes is, until the list is taken."""
    page.evaluate(
        """() => {
          window.widths = [];
          window.watching = setInterval(() => {
            const fill = document.querySelector(".total .fill");
            if (fill) window.widths.push(parseFloat(fill.style.width));
          }, 50);
        }"""
    )

    def taken() -> list[float]:
        found: list[float] = page.evaluate("clearInterval(window.watching), window.widths")
        return found

    return taken


def test_an_upgrade_is_planned_done_rolled_back_and_deleted(
    signed_in: Open, fleet: Fleet, warehouse: Warehouse
) -> None:
    image = warehouse.publish("tool", "two", megabytes=1)
    assert image is not None
    fleet.done("install", "tool", ["worker-1", "worker-2", "worker-3"])
    warehouse.publish("tool", "three", megabytes=1)
    page = signed_in().page
    page.goto(f"{fleet.first.url}/#/backends")
    page.get_by_role("button", name="Check for upgrades").click()
    expect(page.locator("h1")).to_contain_text("1 upgrade is available", timeout=LONG_MS)
    row = page.locator(".matrix tr", has_text="tool")
    expect(row.get_by_text("↑ upgrade")).to_have_count(3)
    row.get_by_role("button", name="Actions for tool", exact=True).click()
    page.get_by_role("menuitem", name="Upgrade to").click()
    page.get_by_role("dialog").get_by_role("button", name="Upgrade on 3 nodes").click()
    follow(page, "Upgrade of tool was accepted.")
    expect(page.locator("h1")).to_have_text("Upgrade tool: 3 of 3 done.", timeout=LONG_MS)

    page.goto(f"{fleet.first.url}/#/backends?again")
    row.get_by_role("button", name="Actions for tool", exact=True).click()
    page.get_by_role("menuitem", name="Roll back…").click()
    page.get_by_role("dialog").get_by_role("button", name="Roll back on 3 nodes").click()
    follow(page, "Roll back of tool was accepted.")
    expect(page.locator("h1")).to_have_text("Roll back tool: 3 of 3 done.", timeout=LONG_MS)

    page.goto(f"{fleet.first.url}/#/backends?once-more")
    row.get_by_role("button", name="Actions for tool", exact=True).click()
    page.get_by_role("menuitem", name="Delete everywhere…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("button", name="Delete it from 3 nodes")).to_be_disabled()
    dialog.get_by_label("Type tool to confirm").fill("tool")
    dialog.get_by_role("button", name="Delete it from 3 nodes").click()
    expect(row).to_have_count(0, timeout=LONG_MS)


def test_the_nodes_of_an_install_are_chosen_in_its_plan(signed_in: Open, fleet: Fleet, warehouse: Warehouse) -> None:
    """And the request stays in the history of that node, not of the others, also for who opens the page later."""
    warehouse.publish("spoilt", "chosen")
    page = signed_in().page
    page.goto(f"{fleet.first.url}/#/backends?q=spoilt&show=all")
    page.get_by_role("button", name="Plan the install of spoilt").click()
    drawer = page.get_by_role("dialog")
    expect(drawer.get_by_role("button", name="Install on 3 nodes")).to_be_visible()
    for name in ("worker-2", "worker-3"):
        drawer.get_by_label(name).uncheck()
    expect(drawer).to_contain_text("1 node would change")
    drawer.get_by_role("button", name="Install on 1 node").click()
    follow(page, "Install of lab@spoilt was accepted.")
    expect(page.locator("h1")).to_have_text("Install spoilt: 1 of 1 done.", timeout=LONG_MS)
    expect(page.locator(".moments")).to_contain_text("worker-1: done.")

    made = page.url.rpartition("/")[2]
    own = page.locator(f'.rows a[href="#/operations/{made}"]')
    page.goto(f"{fleet.first.url}/#/nodes/worker-1")
    page.reload()
    expect(own).to_contain_text("Install spoilt")
    page.goto(f"{fleet.first.url}/#/operations")
    page.get_by_label("Filter by node").select_option("worker-2")
    expect(page.get_by_text("Reading the history")).to_have_count(0)
    expect(own).to_have_count(0)
    page.get_by_label("Filter by node").select_option("worker-1")
    expect(own).to_contain_text("Install spoilt")
    fleet.done("delete", "spoilt", ["worker-1"])


def test_a_file_of_this_computer_becomes_a_model_that_answers(
    signed_in: Open, fleet: Fleet, warehouse: Warehouse
) -> None:
    warehouse.publish("speaker", "said", run=program("I am here"))
    page = signed_in().page
    page.goto(f"{fleet.first.url}/#/models")
    page.get_by_role("button", name="Add a model").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("tab", name="A file of this computer").click()
    dialog.get_by_label("File (GGUF)").set_input_files(TINY)
    # Typed before the page has shown the name that it suggests, the text would be appended to that.
    expect(dialog.get_by_label("Name", exact=True)).to_have_value(TINY.stem)
    dialog.get_by_label("Name", exact=True).fill("voice")
    dialog.get_by_text("More").click()
    dialog.get_by_label("Backend").fill("speaker")
    dialog.get_by_role("button", name="Add voice").click()
    row = page.locator(".modelrow", has_text="voice")
    expect(row).to_contain_text("ready", timeout=LONG_MS)
    row.get_by_role("link", name="Chat").click()
    page.get_by_label("Your message").fill("Who are you?")
    page.keyboard.press("Enter")
    answer = page.locator(".said.theirs")
    expect(answer).to_contain_text("I am here", timeout=LONG_MS)
    expect(answer.locator(".figures")).to_contain_text(re.compile(r"on worker-\d · first token after \d"))
    page.get_by_role("button", name="As curl or Python").click()
    expect(page.get_by_role("dialog")).to_contain_text(f"curl -s {fleet.first.url}/v1/chat/completions")
    page.keyboard.press("Escape")

    page.goto(f"{fleet.first.url}/#/models/voice")
    expect(page.get_by_text("Where would another replica go?")).to_be_visible()
    page.get_by_role("button", name="Scale…").click()
    page.get_by_label("At least").fill("2")
    page.get_by_role("button", name="Set the schedule").click()
    expect(page.get_by_text(re.compile(r"2 replicas on worker-\d and worker-\d; as many as wanted"))).to_be_visible(
        timeout=LONG_MS
    )
    page.get_by_role("button", name="Scale…").click()
    page.get_by_role("button", name="Remove the schedule").click()
    page.get_by_role("button", name="Edit…").first.click()
    text = page.get_by_label("Configuration as JSON")
    text.fill('{"name": "voice", "backend": "speaker", ')
    expect(page.get_by_role("alert")).to_contain_text("not valid JSON")
    expect(page.get_by_role("button", name="Store the configuration")).to_be_disabled()
    text.fill('{"name": "voice", "backend": "speaker", "known_usecases": ["chat", "vision"]}')
    page.get_by_role("button", name="Store the configuration").click()
    expect(page.locator(".message", has_text="voice has a new configuration.")).to_be_visible()
    stored = fleet.first.get("/api/models/voice")
    assert stored["config"]["known_usecases"] == ["chat", "vision"]
    assert [file["name"] for file in stored["files"]] == [TINY.name]
    page.goto(f"{fleet.first.url}/#/chat?model=voice")
    page.locator("label.button", has_text="Add a picture").locator("input").set_input_files(
        {"name": "dot.png", "mimeType": "image/png", "buffer": DOT}
    )
    page.get_by_label("Your message").fill("What is this?")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Your message")).to_have_value("")
    expect(page.locator(".said.mine").last.get_by_role("img", name="dot.png")).to_be_visible()
    expect(page.locator(".said.theirs").last).to_contain_text("I am here", timeout=LONG_MS)
    page.goto(f"{fleet.first.url}/#/models/voice")
    page.get_by_role("button", name="Delete…").click()
    page.get_by_label("Type voice to confirm").fill("voice")
    page.get_by_role("dialog").get_by_role("button", name="Delete voice").click()
    page.goto(f"{fleet.first.url}/#/models")
    expect(page.locator(".modelrow", has_text="voice")).to_have_count(0, timeout=LONG_MS)


def test_the_page_goes_on_when_the_connection_is_lost_and_its_frontend_killed(
    signed_in: Open, fleet: Fleet, warehouse: Warehouse
) -> None:
    """F-117: through one address for both frontends; the true state is back within seconds, from either."""
    with balanced(warehouse, [one.port for one in fleet.frontends]) as balancer:
        wait_for("both to be ready", lambda: len(balancer.ready) == 2)
        watched = signed_in(balancer.url)
        page = watched.page
        expect(page.locator(".fresh")).to_contain_text("live")
        page.context.set_offline(True)
        # A browser that is offline lets an open stream live; the frontend's end does not.
        for frontend in fleet.frontends:
            frontend.pause()
        expect(page.locator(".fresh")).to_contain_text("reconnecting", timeout=LONG_MS)
        for frontend in fleet.frontends:
            frontend.resume()
        page.context.set_offline(False)
        expect(page.locator(".fresh")).to_contain_text("live", timeout=LONG_MS)

        fleet.first.kill()
        fleet.workers["worker-2"].pause()
        expect(page.locator(".fresh")).to_contain_text("live", timeout=LONG_MS)
        panel = page.locator(".panel", has=page.get_by_role("link", name="worker-2", exact=True))
        expect(panel).to_contain_text("offline", timeout=LONG_MS)
        expect(page.locator("h1")).to_contain_text("2 of 3 nodes are healthy")
        fleet.workers["worker-2"].resume()
        expect(page.locator("h1")).to_contain_text("All 3 nodes are healthy", timeout=LONG_MS)


def test_a_request_for_a_machine_that_is_away_waits_and_is_said(
    signed_in: Open, fleet: Fleet, warehouse: Warehouse
) -> None:
    warehouse.publish("spoilt", "one")
    fleet.workers["worker-2"].stop()
    page = signed_in().page
    panel = page.locator(".panel", has=page.get_by_role("link", name="worker-2", exact=True))
    expect(panel).to_contain_text("offline", timeout=LONG_MS)
    made = fleet.request("install", "spoilt", ["worker-2"])
    expect(panel).to_contain_text("1 request waits for it", timeout=LONG_MS)
    expect(panel).to_contain_text("last known")
    page.goto(f"{fleet.first.url}/#/operations/{made['jobID']}")
    expect(page.locator(".noderow")).to_contain_text("starts when the node reconnects")
    fleet.workers["worker-2"].start()
    expect(page.locator("h1")).to_have_text("Install spoilt: 1 of 1 done.", timeout=LONG_MS)


def test_somebody_who_may_only_look_is_shown_the_refusal_and_nothing_changes(signed_in: Open, fleet: Fleet) -> None:
    page = signed_in(role="viewer").page
    expect(page.locator(".panel")).to_have_count(3)
    expect(page.get_by_role("button", name="Add a machine")).to_have_count(0)
    status = page.evaluate(
        "fetch('/api/nodes/worker-1/drain', {method: 'POST', body: '{}'}).then((answer) => answer.status)"
    )
    assert status == 403
    assert not fleet.node("worker-1")["drained"]


def test_another_site_can_change_nothing_with_the_session_of_a_person(
    signed_in: Open, states: str, fleet: Fleet
) -> None:
    """F-115: by fetch, by a form, and by a link, from a page on another host of the same machine."""
    watched = signed_in()
    stranger = watched.page.context.new_page()
    stranger.goto(states.format("index"))
    target = f"{fleet.first.url}/api/nodes/worker-1/drain"
    stranger.evaluate(
        """(target) => fetch(target, {method: "POST", mode: "no-cors", credentials: "include", body: "{}"})
          .catch(() => {})""",
        target,
    )
    stranger.evaluate("(target) => fetch(target, {credentials: 'include', mode: 'no-cors'}).catch(() => {})", target)
    stranger.set_content(f'<form method="post" action="{target}"><button>Win</button></form>')
    with stranger.expect_navigation():
        stranger.get_by_role("button").click()
    assert "cannot" in stranger.inner_text("body")
    assert not fleet.node("worker-1")["drained"]
    assert watched.page.evaluate("fetch('/api/session').then((answer) => answer.status)") == 200


def test_tokens_sessions_audit_and_settings_are_shown_and_a_token_ends(signed_in: Open, fleet: Fleet) -> None:
    page = signed_in().page
    page.goto(f"{fleet.first.url}/#/access")
    page.get_by_role("button", name="Create a token").click()
    page.get_by_label("Name (left out: made up)").fill("shop")
    page.get_by_role("button", name="Create the token").click()
    shown = page.get_by_role("dialog", name="The token shop")
    secret = shown.locator("pre").inner_text()
    assert secret.startswith("eh-user-")
    page.keyboard.press("Escape")
    expect(shown).to_have_count(0)
    row = page.locator("tr", has_text="shop")
    expect(row).to_contain_text("user")
    assert secret not in page.content()
    row.get_by_role("button", name="Revoke shop").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke shop").click()
    expect(row).to_have_count(0)
    page.get_by_role("tab", name="Sessions").click()
    expect(page.locator("tr", has_text="(this one)")).to_be_visible()
    page.get_by_role("tab", name="Audit").click()  # written some seconds later: an open page follows
    expect(page.locator("tbody tr", has_text="DELETE /api/tokens/").first).to_contain_text("shop")
    page.goto(f"{fleet.first.url}/#/settings")
    expect(page.locator("tr", has_text="without a heartbeat")).to_contain_text("--stale")
    assert fleet.tokens["admin"] not in page.content()


def test_a_log_is_followed_and_a_machine_that_is_drained_says_when_it_is_safe(
    signed_in: Open, fleet: Fleet, warehouse: Warehouse
) -> None:
    # Without what its server says of clients that leave, which would push the line out of sight.
    quiet = "import socketserver; socketserver.BaseServer.handle_error = lambda *_: None\n"
    chatty = "print('engine: ready \\x1b[31mred\\x1b[0m', flush=True)\n"
    # An engine that no other test has installed: what is installed is not fetched again.
    warehouse.publish("talker", "said", run=program("I am here", first=quiet + chatty))
    content = TINY.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    page = signed_in().page
    whole = RawBody(content, {"Content-Range": f"bytes 0-{len(content) - 1}/{len(content)}"})
    fleet.first.client.request_bytes("PUT", f"/api/uploads/{digest}", whole)
    file = {"name": "tiny.gguf", "uri": f"upload:{digest}", "sha256": digest, "size_bytes": len(content)}
    fleet.first.post("/api/models", {"name": "logged", "backend": "talker", "files": [file]})
    fleet.ended(fleet.first.post("/api/models/logged/load", {"node": "worker-1"}))
    page.goto(f"{fleet.first.url}/#/logs")
    page.get_by_role("link", name="logged on worker-1").click()
    expect(page.get_by_role("log")).to_contain_text("engine: ready red", timeout=LONG_MS)
    assert "\x1b" not in page.inner_text("body")

    page.goto(f"{fleet.first.url}/#/nodes/worker-1")
    page.get_by_role("button", name="Drain…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("its 1 replica (logged) stops")
    dialog.get_by_role("button", name="Drain worker-1").click()
    expect(page.get_by_text("Safe to stop: nothing runs there, and nothing is sent there.")).to_be_visible(
        timeout=LONG_MS
    )
    assert fleet.node("worker-1")["replicas"] == []
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("h1 .pill")).to_have_text("●healthy", timeout=LONG_MS)
    fleet.ended(fleet.first.delete("/api/models/logged"))
