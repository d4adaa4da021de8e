"""Which version a node has, by the digest that it recorded."""

from __future__ import annotations

import pytest

from enginehouse.core.artifact import Artifact
from enginehouse.core.backend import Resolved, change_note, is_version


def resolved(digest: str, index_digest: str = "") -> Resolved:
    return Resolved(directory="engine", uri="oci://example.com/engine:1", digest=digest, index_digest=index_digest)


@pytest.mark.parametrize(
    ("recorded", "build", "is_same"),
    [
        ("sha256:a", resolved("sha256:a"), True),
        ("sha256:i", resolved("sha256:a", "sha256:i"), True),  # LocalAI records the digest of the index
        ("sha256:b", resolved("sha256:a", "sha256:i"), False),
        ("", resolved(""), False),  # two unknown digests are not the same version
        ("sha256:a", resolved(""), False),
        ("sha256:a", Artifact(uri="u", digest="sha256:a", platform="linux/amd64", layers=()), True),
    ],
)
def test_a_version_is_known_by_a_recorded_digest_only(recorded: str, build: Resolved | Artifact, is_same: bool) -> None:
    assert is_version(recorded, build) is is_same


@pytest.mark.parametrize(
    ("before", "after", "note"),
    [
        (None, ("1.4", "sha256:b"), "now 1.4"),
        (("1.3", "sha256:a"), ("1.4", "sha256:b"), "from 1.3 to 1.4"),
        (("1.4", "sha256:b"), ("1.4", "sha256:b"), "already at 1.4"),
        (("1.4", "sha256:aaaa"), ("1.4", "sha256:bbbb"), "from aaaa to bbbb"),
        (("", "sha256:aaaa"), ("", "sha256:bbbb"), "from aaaa to bbbb"),
        (("1.4", ""), ("1.4", "sha256:b"), "already at 1.4"),
    ],
)
def test_what_an_install_changed_is_said_from_what_to_what(
    before: tuple[str, str] | None, after: tuple[str, str], note: str
) -> None:
    assert change_note(before, after) == note
