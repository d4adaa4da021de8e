"""How often a node that waits for approval asks again."""

from __future__ import annotations

from itertools import islice

from enginehouse.worker.registration import pending_pauses


def test_a_pending_worker_asks_ever_more_seldom_and_notices_its_approval_within_fifteen_seconds() -> None:
    for _ in range(50):
        pauses = list(islice(pending_pauses(), 40))
        assert pauses[0] < 3, "an operator who is at the keyboard does not wait"
        assert max(pauses) < 15
        assert sum(pauses[-30:]) / 30 > 10
        assert sum(pauses[:4]) < sum(pauses[4:8]) < sum(pauses[10:14])


def test_machines_that_started_together_do_not_ask_together() -> None:
    assert len({round(list(islice(pending_pauses(), 5))[-1], 3) for _ in range(20)}) > 10
