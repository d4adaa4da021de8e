"""What the engine of a replica speaks

The column has a server default, so that frontends of the previous version keep working.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("replicas", sa.Column("protocol", sa.String(32), nullable=False, server_default="openai-http"))


def downgrade() -> None:
    op.drop_column("replicas", "protocol")
