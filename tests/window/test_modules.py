"""The modules of the page that are pure: state, words, Markdown, charts, digests. Run by the browser, one by one."""

from __future__ import annotations

import hashlib
import itertools
import json
import shlex
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.window.states import SCENES, Scene, node

from enginehouse.cli.terminal import fleet_words
from enginehouse.cli.terminal.fleet_state import FleetState
from enginehouse.core.join_line import join_line
from enginehouse.core.model_definition import patched

Run = Callable[[str, str], Any]
SCHEDULES = [
    {"model_name": "gemma", "min_replicas": 1, "max_replicas": 0, "reason": "cannot place gemma: needs 5 GiB, 3 free"},
    {"model_name": "qwen", "min_replicas": 2, "max_replicas": 0, "reason": "the engine ended"},
]
# Progress as it may arrive: of two intents, in two attempts, with some bytes of a hundred.
ROW = st.fixed_dictionaries(
    {
        "intent": st.sampled_from(["a", "b"]),
        "attempt": st.just(1),
        "current_bytes": st.integers(0, 100),
        "percentage": st.integers(0, 99),
    }
)
EVENTS = st.lists(st.tuples(st.integers(1, 6), st.lists(ROW, min_size=1, max_size=2)), max_size=12)
SLOW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def plain(value: object) -> Any:
    return json.loads(msgspec.json.encode(value))


def event(revision: int, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    full = [
        {"node_id": row["intent"], "node_name": row["intent"], "status": "downloading", "total_bytes": 100, **row}
        for row in rows
    ]
    done = sum(row["current_bytes"] for row in rows)
    base = {"jobID": "1", "kind": "install", "name": "x", "status": "running", "createdAt": "2026-01-01T00:00:00Z"}
    return {
        **base,
        "counts": {"downloading": 2},
        "revision": revision,
        "nodes": full,
        "currentBytes": done,
        "totalBytes": 200,
        "progress": done // 2,
        "partial": True,
        **more,
    }


@SLOW
@given(EVENTS)
def test_whatever_order_events_come_in_nothing_goes_back(modules: Run, events: list[Any]) -> None:
    nothing = {"attempt": 1, "current_bytes": 0, "percentage": 0}
    whole = event(1, [{"intent": name, **nothing} for name in "ab"], partial=False)
    told = [whole, *(event(revision, rows) for revision, rows in events)]
    seen = modules(
        "state.js",
        f"""const state = it.emptyState(); const seen = [];
        {json.dumps(told)}.forEach((one, at) => {{
          it.apply(state, "operation", one, at);
          const now = state.operations.get("1");
          seen.push([now.revision, now.totals.currentBytes, now.totals.percent, now.totals.count,
            ...now.nodes.map((row) => row.current_bytes), ...now.nodes.map((row) => row.percentage)]);
        }});
        return seen;""",
    )
    for before, after in itertools.pairwise(seen):
        assert len(before) == len(after)
        assert all(old <= new for old, new in zip(before, after, strict=True)), (before, after)


def test_an_older_state_of_a_node_changes_nothing_and_a_removed_one_stays_for_a_moment(modules: Run) -> None:
    found = modules(
        "state.js",
        """const state = it.emptyState();
        const node = (name, at) => ({id: "1", name, updated_at: `2026-01-01T00:00:0${at}Z`});
        it.apply(state, "node", node("new", 5), 1); it.apply(state, "node", node("old", 3), 2);
        const kept = state.nodes.get("1").name;
        it.apply(state, "node-removed", {id: "1"}, 3); it.sweep(state, 4);
        const marked = Boolean(state.nodes.get("1").removedAt);
        it.sweep(state, 20);
        return [kept, marked, state.nodes.size];""",
    )
    assert found == ["new", True, 0]


def test_after_a_gap_nodes_that_are_gone_go_and_a_new_attempt_may_begin_again(modules: Run) -> None:
    found = modules(
        "state.js",
        """const state = it.emptyState();
        for (const id of ["1", "2"]) it.apply(state, "node", {id, name: id, updated_at: "1"}, 1);
        it.apply(state, "caught-up", {nodes: ["2"]}, 2);
        const row = (attempt, bytes) => ({intent: "a", node_name: "a", attempt, status: "downloading", total_bytes: 9,
          current_bytes: bytes, percentage: bytes});
        const told = (revision, one) => it.apply(state, "operation", {jobID: "1", status: "running", revision,
          counts: {}, nodes: [one], createdAt: ""}, revision);
        told(1, row(1, 8)); told(2, row(2, 3));
        return [[...state.nodes.values()].filter((one) => !one.removedAt).map((one) => one.id),
          state.operations.get("1").nodes[0].current_bytes];""",
    )
    assert found == [["2"], 3]


@pytest.mark.parametrize("name", ["empty", "first-start", "healthy", "mixed", "hundred-nodes"])
def test_the_page_and_top_say_the_same(modules: Run, name: str) -> None:
    """The line of truth and what needs a person, word for word."""
    scene = SCENES[name]()
    now = time.time()
    state = FleetState()
    state.connected(now, is_resumed=False)
    lists = {"nodes": plain(scene.nodes), "models": plain(scene.models), "schedules": SCHEDULES, "operations": []}
    state.take_list("nodes", lists["nodes"], now, now)
    state.take_list("models", lists["models"], now, now)
    state.take_list("schedules", lists["schedules"], now, now)
    for kind, body in events_of(scene):
        state.take_event(kind, msgspec.json.encode(body), now)
    script = f"""const {{attention, truth}} = await import("/web/attention.js");
        const state = it.emptyState();
        it.putLists(state, {json.dumps(lists)}, {now});
        for (const [kind, body] of {json.dumps([[kind, plain(body)] for kind, body in events_of(scene)])})
          it.apply(state, kind, body, {now});
        const texts = attention(state, {now}).map((one) => one.kind === "pending"
          ? `${{one.text}} (${{one.node.fingerprint}})` : one.text);
        return [truth(state).pieces, texts];"""
    pieces, texts = modules("state.js", script)
    assert pieces == fleet_words.truth(state, now)
    assert sorted(texts) == sorted(one.sentence for one in fleet_words.needs(state, now))
    order = [text.split()[0] for text in texts]
    assert order == [one.sentence.split()[0] for one in fleet_words.needs(state, now)]


@pytest.mark.parametrize(
    ("heard", "more", "is_needed"), [(5, {}, False), (90, {}, True), (5, {"fingerprint": ""}, True)]
)
def test_a_machine_that_was_just_approved_is_on_its_way_before_it_is_missing(
    modules: Run, heard: float, more: dict[str, Any], is_needed: bool
) -> None:
    now = time.time()
    new = {"status": "offline", "health": "offline", "worker_version": "", "fingerprint": "9f2c", "age": heard}
    shed = node("shed", **{**new, **more})
    state = FleetState()
    state.connected(now, is_resumed=False)
    state.take_list("nodes", [plain(shed)], now, now)
    script = f"""const {{attention}} = await import("/web/attention.js");
        const state = it.emptyState();
        it.putLists(state, {{nodes: [{json.dumps(plain(shed))}]}}, {now});
        return attention(state, {now}).map((one) => one.text);"""
    texts = [one.sentence for one in fleet_words.needs(state, now)]
    assert modules("state.js", script) == texts
    assert [text.split(" for ")[0] for text in texts] == ["shed has been offline"] * is_needed


def test_late_heartbeats_and_a_small_disk_are_said_by_both(modules: Run) -> None:
    now = time.time()
    late = node("late", status="unhealthy", health="unhealthy")
    small = node("small", total_disk=4 * 1024**3, available_disk=300 * 1024**2)
    nodes = plain([late, small])
    state = FleetState()
    state.connected(now, is_resumed=False)
    state.take_list("nodes", nodes, now, now)
    script = f"""const {{attention}} = await import("/web/attention.js");
        const state = it.emptyState();
        it.putLists(state, {{nodes: {json.dumps(nodes)}}}, {now});
        return attention(state, {now}).map((one) => one.text);"""
    texts = modules("state.js", script)
    assert texts == [one.sentence for one in fleet_words.needs(state, now)]
    assert [text.split()[0] for text in texts] == ["small", "late"]


def events_of(scene: Scene) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = [("operation", one) for one in scene.operations]
    return [*found, *([("pulse", scene.pulse)] if scene.pulse else [])]


def test_amounts_and_times_hold_still(modules: Run) -> None:
    found = modules(
        "words.js",
        """return [it.bytes(0), it.bytes(1536), it.bytes(null), it.bytesOf(1.2 * 2 ** 30, 3.1 * 2 ** 30),
        it.bytesOf(5, 0), it.rate(null), it.rate(0), it.rate(318.4), it.span(59), it.span(60), it.span(3 * 3600 + 240),
        it.span(90000), it.clock(48), it.clock(3661), it.names(["a"]), it.names(["a", "b", "c", "d", "e"]),
        it.count(1, "node"), it.count(1234, "node")];""",
    )
    assert found == [
        *("0 B", "1.5 KiB", "\u2013", "1.2 of 3.1 GiB", "5 B", "\u2013", "0.0", "318", "59 s", "1 min", "3 h 4 min"),
        *("1 d", "0:48", "1:01:01", "a", "a, b, c and 2 more", "1 node", "1,234 nodes"),
    ]


def test_the_line_for_another_machine_is_that_of_the_command_line_and_quotes_what_people_type(modules: Run) -> None:
    for name in ("", "attic", "two words", "it's", "$(reboot)", "a;b", '"', "`x`", "\u00fc"):
        for is_service in (False, True):
            url = "http://[fd00::1]:8080"
            found = modules(
                "words.js", f"return it.joinLine({json.dumps(url)}, {json.dumps(name)}, {str(is_service).lower()});"
            )
            assert shlex.split(found) == shlex.split(join_line(url, name=name, is_service=is_service))
            assert shlex.split(found)[7:] == [url, *(["--name", name] if name else []), *(["--service"] * is_service)]


MARKDOWN = {
    "**bold** and `code`": ["p", ["strong", "bold"], " and ", ["code", "code"]],
    "[a](https://x.example/y)": ["p", ["a", "a"]],
    "[a](javascript:alert(1))": ["p", "a (javascript:alert(1)", ")"],
    "[a](data:text/html,x)": ["p", "a (data:text/html,x)"],
    "<b onclick=x>no</b>": ["p", "<b onclick=x>no</b>"],
    "```js\nlet x = '<i>';": ["pre", ["code", "let x = '<i>';"]],
    "1. one\n2. two": ["ol", ["li", "one"], ["li", "two"]],
    "# Head": ["p", "Head"],
    "> said": ["blockquote", "said"],
}


@pytest.mark.parametrize("text", sorted(MARKDOWN))
def test_markdown_becomes_elements_and_nothing_else(modules: Run, text: str) -> None:
    found = modules(
        "markdown.js",
        f"""const tree = (one) => one.tag === "" ? one.text : [one.tag, ...one.children.map(tree)];
        return it.markdown({json.dumps(text)}).map(tree);""",
    )
    assert found == [MARKDOWN[text]]


def test_long_and_deep_markdown_takes_no_time(modules: Run) -> None:
    texts = ["*" * 20_000, "[" * 20_000, "> " * 5_000, "- " * 5_000, "_a" * 10_000, "`" * 20_001, "a **b " * 5_000]
    for text in texts:
        script = f"const began = performance.now(); it.markdown({json.dumps(text)}); return performance.now() - began;"
        taken = modules("markdown.js", script)
        assert taken < 1000, (text[:10], taken)


@SLOW
@given(st.binary(max_size=300), st.integers(1, 100))
def test_digests_are_those_of_everybody_else(modules: Run, content: bytes, step: int) -> None:
    found = modules(
        "sha256.js",
        f"""const bytes = new Uint8Array({list(content)}); const digest = new it.Sha256();
        for (let at = 0; at < bytes.length; at += {step}) digest.update(bytes.subarray(at, at + {step}));
        return digest.hex();""",
    )
    assert found == hashlib.sha256(content).hexdigest()


@SLOW
@given(st.data())
def test_what_was_changed_in_a_configuration_makes_the_new_one_of_the_old_one(
    modules: Run, data: st.DataObject
) -> None:
    leaves = st.integers(0, 2) | st.lists(st.integers(0, 2), max_size=2) | st.sampled_from(["", "x"])
    trees = st.recursive(leaves, lambda below: st.dictionaries(st.sampled_from("abc"), below, max_size=3), max_leaves=6)
    configurations = st.dictionaries(st.sampled_from("abc"), trees, max_size=3)
    before, after = data.draw(configurations), data.draw(configurations)
    change = modules("parts/edit_model.js", f"return it.difference({json.dumps(before)}, {json.dumps(after)});")
    assert patched(before, change) == after
    assert (change == {}) == (before == after)


def test_gaps_of_a_line_stay_gaps(modules: Run) -> None:
    script = "return [it.pieces([1, null, 2, 3, null], 40, 10, 4), it.ceiling([0.3, null]), it.ceiling([])];"
    found = modules("charts.js", script)
    lines, low, empty = found
    assert [len(line.split()) for line in lines] == [2, 2]
    assert (low, empty) == (0.5, 1)


def test_what_turns_or_hides_text_is_shown_as_unknown(modules: Run) -> None:
    assert (
        modules("dom.js", r"return it.plain('a\u202eb\u001b[31mred\u001b[0m\u0007\tc\n')") == "a\ufffdbred\ufffd\tc\n"
    )
