"""What the engine of a replica speaks, and the model that it has loaded

The columns have server defaults, so that frontends of the previous version keep working.
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
    op.add_column("replicas", sa.Column("definition", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("replicas", "definition")
    op.drop_column("replicas", "protocol")
