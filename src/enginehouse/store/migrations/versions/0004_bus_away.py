"""Whether a node's worker says that it has no connection to the bus

With a default in the database, so that a frontend of the version before goes on beside this one.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("bus_away", sa.Boolean, nullable=False, server_default=sa.false()))


def downgrade() -> None:
    op.drop_column("nodes", "bus_away")
