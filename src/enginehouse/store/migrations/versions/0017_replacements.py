"""The replica that a load replaces

The column has a server default, so that frontends of the previous version keep working. They finish such a load without
stopping the replaced replica; the next look at the model does it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("operations", sa.Column("replaces", sa.Text, nullable=False, server_default="null"))


def downgrade() -> None:
    op.drop_column("operations", "replaces")
