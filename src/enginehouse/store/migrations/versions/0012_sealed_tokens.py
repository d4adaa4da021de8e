"""The registration tokens of LocalAI's workers, sealed

The column has a server default, so that frontends of the previous version keep working.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("sealed_token", sa.String(1024), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("nodes", "sealed_token")
