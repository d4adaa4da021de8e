"""When a token was last used, the token before a rotation, keys that were rejected, and names of removed nodes

Frontends of the previous version know none of these: they refuse a rotated token at once, and note no use.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tokens", sa.Column("used_at", sa.Double, nullable=False, server_default="0"))
    op.add_column("tokens", sa.Column("previous_hash", sa.String(64), nullable=False, server_default=""))
    op.add_column("tokens", sa.Column("previous_until", sa.Double, nullable=False, server_default="0"))
    op.create_table(
        "rejected_keys",
        sa.Column("public_key", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("rejected_at", sa.Double, nullable=False),
    )
    op.create_table(
        "removed_nodes",
        sa.Column("node_id", sa.String(36), primary_key=True),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("removed_at", sa.Double, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("removed_nodes")
    op.drop_table("rejected_keys")
    for column in ("previous_until", "previous_hash", "used_at"):
        op.drop_column("tokens", column)
