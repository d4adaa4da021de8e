"""Abandoned commands that a LocalAI worker may still carry out"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "lingering_commands",
        sa.Column("intent_id", sa.String(36), primary_key=True),
        sa.Column("node_id", sa.String(36), nullable=False),
        sa.Column("subject", sa.String(512), nullable=False),
        sa.Column("sent_at", sa.Double, nullable=False),
    )
