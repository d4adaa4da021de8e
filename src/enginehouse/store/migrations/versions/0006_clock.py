"""The clock of a store on SQLite, which follows the machine's boot clock instead of the wall clock"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "clock",
        sa.Column("boot", sa.String(64), primary_key=True),
        sa.Column("began_at", sa.Double, nullable=False),
        sa.Column("written_at", sa.Double, nullable=False),
    )
