"""What the embedded server refused is counted from its own log, whoever was refused."""

from __future__ import annotations

from pathlib import Path

from tests.bus.test_nats import Inbox, running, until

from enginehouse.bus.violations import READ_BYTES, ViolationLog
from enginehouse.core import subjects
from enginehouse.core.ids import IntentId, NodeId

LINE = (
    '[7] 2026/01/01 00:00:00.000000 [ERR] 127.0.0.1:1 - cid:8 - "v1:go" - "A1/enginehouse/jwt:UAZFC4AO6KIX3CM3" - '
    'Publish Violation - Subject "_INBOX.x"\n'
)


async def test_a_workers_forged_messages_are_counted(tmp_path: Path) -> None:
    counted = ViolationLog(tmp_path / "nats.log")
    async with running(tmp_path) as world:
        frontend, bad = await world.frontend(), await world.worker(NodeId("n-1"))
        replies = Inbox()
        await frontend.subscribe(subjects.ALL_REPLIES, replies)
        counted.count_new()
        assert not counted.counts
        for _ in range(3):
            await bad.publish(subjects.reply_subject(NodeId("n-2"), IntentId("i"), 1), b"forged")
        await bad.publish(subjects.reply_subject(NodeId("n-1"), IntentId("i"), 1), b"own")
        assert (await replies.next()).payload == b"own"

        def three() -> bool:
            counted.count_new()
            return counted.counts["publish"] == 3

        await until(three)


def test_a_line_is_counted_once_and_a_log_that_began_anew_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "nats.log"
    counted = ViolationLog(path)
    counted.count_new()
    path.write_text(LINE + LINE[:40])
    counted.count_new()
    counted.count_new()
    assert counted.counts == {"publish": 1}
    path.write_text(LINE + LINE)
    counted.count_new()
    assert counted.counts == {"publish": 2}
    path.write_text(LINE.replace("Publish", "Subscription"))
    counted.count_new()
    assert counted.counts == {"publish": 2, "subscription": 1}


def test_a_flood_costs_one_bounded_read(tmp_path: Path) -> None:
    path = tmp_path / "nats.log"
    path.write_text(LINE * (3 * READ_BYTES // len(LINE)))
    counted = ViolationLog(path)
    counted.count_new()
    assert 0 < counted.counts["publish"] <= READ_BYTES // len(LINE) + 1
    before = counted.counts["publish"]
    counted.count_new()
    assert counted.counts["publish"] == before
