"""Since when a LocalAI worker is known to have an abandoned command"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("lingering_commands", sa.Column("received_at", sa.Double, nullable=False, server_default="0"))
