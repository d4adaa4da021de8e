"""Indexes by which a pass of the reconciler finds what changed without reading every row"""

from __future__ import annotations

from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("replicas_model", "replicas", ["model", "created_at", "leaving"])
    op.drop_index("nodes_updated", "nodes")
    op.create_index("nodes_updated", "nodes", ["updated_at", "id"])


def downgrade() -> None:
    op.drop_index("replicas_model", "replicas")
    op.drop_index("nodes_updated", "nodes")
    op.create_index("nodes_updated", "nodes", ["updated_at"])
