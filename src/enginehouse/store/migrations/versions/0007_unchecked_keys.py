"""Whether the engine of a replica refuses requests without its key

The column has a server default, so that frontends of the previous version keep working.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("replicas", sa.Column("checks_key", sa.Boolean, nullable=False, server_default=sa.true()))
