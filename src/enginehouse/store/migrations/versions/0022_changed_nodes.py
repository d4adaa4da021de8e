"""An index by which frontends find changed nodes: they read every row, and on SQLite every report in it"""

from __future__ import annotations

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("nodes_updated", "nodes", ["updated_at"])


def downgrade() -> None:
    op.drop_index("nodes_updated", "nodes")
