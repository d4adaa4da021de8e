"""What a report proves of an install: by digest where one is known, by generation where none is."""

from __future__ import annotations

import pytest

from enginehouse.core.action import InstallBackend
from enginehouse.core.backend import InstalledBackend, Resolved
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.intent import Intent
from enginehouse.core.report import Report, is_older, shows


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
