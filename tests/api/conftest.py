"""A frontend of these tests finds a database with its tables in its directory, as after its first start."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def migrated(sqlite_url: str) -> None:
    """Migrating one anew takes longer than most of these tests."""
