"""Indexes for frequent queries of every frontend: loads under way, changes since a time"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_index("operations_steered", "operations", ["is_steered"])
    op.create_index("intents_updated", "intents", ["updated_at"])
