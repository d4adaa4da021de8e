"""Wanted replicas, what is known of models beyond their replicas, and reservations of loads

The new columns have server defaults, so that frontends of the previous version keep working.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("replicas", sa.Column("used_at", sa.Double, nullable=False, server_default="0"))
    op.add_column("replicas", sa.Column("leaving", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_table(
        "schedules",
        sa.Column("model_name", sa.String(255), primary_key=True),
        sa.Column("node_selector", sa.Text, nullable=False),
        sa.Column("min_replicas", sa.Integer, nullable=False),
        sa.Column("max_replicas", sa.Integer, nullable=False),
        sa.Column("spread_all", sa.Boolean, nullable=False),
        sa.Column("route_policy", sa.String(32), nullable=False),
        sa.Column("balance_abs_threshold", sa.Integer, nullable=False),
        sa.Column("balance_rel_threshold", sa.Double, nullable=False),
        sa.Column("min_prefix_match", sa.Double, nullable=False),
        sa.Column("idle_seconds", sa.Double, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
    )
    op.create_table(
        "load_infos",
        sa.Column("model", sa.String(255), primary_key=True),
        sa.Column("revision", sa.String(64), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger, nullable=False),
        sa.Column("kept", sa.Text, nullable=False),
        sa.Column("author", sa.String(128), nullable=False),
        sa.Column("scaled_at", sa.Double, nullable=False),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("retry_at", sa.Double, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
    )
    op.create_table(
        "reservations",
        sa.Column("operation_id", sa.String(36), primary_key=True),
        sa.Column("node_id", sa.String(36), nullable=False),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("slot", sa.Integer, nullable=False),
        sa.Column("memory_bytes", sa.BigInteger, nullable=False),
        sa.Column("until", sa.Double, nullable=False),
        sa.Column("settled_at", sa.Double, nullable=False),
        sa.UniqueConstraint("node_id", "model", "slot", name="reservations_slot"),
    )


def downgrade() -> None:
    for table in ("reservations", "load_infos", "schedules"):
        op.drop_table(table)
    op.drop_column("replicas", "leaving")
    op.drop_column("replicas", "used_at")
