"""What a report proves of an install: by digest where one is known, by generation where none is."""

from __future__ import annotations

import msgspec
import pytest

from enginehouse.core.action import InstallBackend
from enginehouse.core.backend import InstalledBackend, Resolved
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.intent import Intent
from enginehouse.core.model import HeldModel
from enginehouse.core.report import Report, ReportStamp, digest_of, is_older, restamped, shows, stored_digest


@pytest.mark.parametrize(
    ("wanted", "force", "reported", "generation", "is_settled"),
    [
        ("sha256:a", False, "sha256:a", 0, True),
        ("sha256:a", True, "sha256:a", 4, False),
        ("sha256:a", True, "sha256:a", 5, True),
        ("sha256:a", False, "sha256:b", 9, False),
        ("sha256:a", False, "", 9, False),
        ("", False, "", 0, False),
        ("", False, "sha256:b", 4, False),
        ("", False, "sha256:b", 5, True),
        ("", True, "", 5, True),
    ],
)
def test_a_digest_that_nobody_knows_equals_none(
    wanted: str, force: bool, reported: str, generation: int, is_settled: bool
) -> None:
    resolved = Resolved(directory="x", uri="h/x:1", digest=wanted)
    intent = Intent(
        id=IntentId("1"),
        node_id=NodeId("n"),
        subject="backend:x",
        generation=5,
        action=InstallBackend(backend="x", resolved=resolved, force=force),
        state="running",
        created_at=0.0,
        updated_at=0.0,
        due_at=0.0,
    )
    backend = InstalledBackend(name="x", is_system=False, is_meta=False, digest=reported, generation=generation)
    outcome = shows(Report(boot_id="b", backends=(backend,)), intent)
    assert (outcome is not None) is is_settled
    assert outcome is None or outcome.digest == reported


def test_a_report_of_a_run_that_has_ended_is_older_than_any_of_the_next() -> None:
    known = Report(boot_id="second", sequence=1, mark=60.0, boot_mark=50.0)
    assert is_older(Report(boot_id="first", sequence=9, mark=40.0, boot_mark=10.0), known)
    assert not is_older(Report(boot_id="third", sequence=1, mark=70.0, boot_mark=70.0), known)
    assert is_older(Report(boot_id="second", sequence=0, mark=60.0, boot_mark=50.0), known)
    assert not is_older(known, known)
    assert is_older(Report(mark=1.0), Report(mark=2.0))


def test_reports_have_one_digest_exactly_if_they_differ_in_nothing_but_their_stamp() -> None:
    plain = Report(boot_id="b", sequence=1, mark=1.0, boot_mark=1.0, version="1", running=(IntentId("i"),))
    again = restamped(plain, ReportStamp(sequence=9, mark=9.0))
    assert (again.sequence, again.mark) == (9, 9.0)
    assert digest_of(again) == digest_of(plain)
    fields: dict[str, object] = {
        **{"boot_id": "c", "boot_mark": 2.0, "version": "2", "confinement": "none", "running": ()},
        **{"restarting": ("tiny#0",), "models": (HeldModel("tiny", ("ab",)),)},
        "backends": (InstalledBackend(name="x", is_system=False, is_meta=False),),
    }
    others = {digest_of(msgspec.structs.replace(plain, **{name: value})) for name, value in fields.items()}
    assert len(others | {digest_of(plain)}) == len(fields) + 1


def test_a_stored_digest_is_bounded_and_that_of_one_version() -> None:
    assert stored_digest("", "1") == ""
    assert len(stored_digest("x" * 10_000 + "\0", "1")) == 64
    assert stored_digest("x", "1") != stored_digest("x", "2")
