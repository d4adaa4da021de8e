"""Whether a node's worker reports that it has no connection to the bus

The column has a server default, so that frontends of the previous version keep working.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("nodes", sa.Column("bus_away", sa.Boolean, nullable=False, server_default=sa.false()))
