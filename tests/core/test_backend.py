"""Which version a node has, by the digest that it recorded."""

from __future__ import annotations

import pytest

from enginehouse.core.artifact import Artifact
from enginehouse.core.backend import Resolved, is_version


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
