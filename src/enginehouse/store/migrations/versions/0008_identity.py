"""Identity of nodes: claims, ordered registrations, rotating tokens, bus credentials, revocable tokens

All new columns have server defaults, so that frontends of the previous version keep working.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    with op.batch_alter_table("nodes") as nodes:
        nodes.add_column(sa.Column("claim", sa.String(64), nullable=False, server_default=""))
        nodes.add_column(sa.Column("waits_for", sa.String(512), nullable=False, server_default=""))
        nodes.add_column(sa.Column("registered_at", sa.Double, nullable=False, server_default="0"))
        nodes.add_column(sa.Column("previous_token_hash", sa.String(64), nullable=False, server_default=""))
        nodes.drop_constraint("nodes_name_key", type_="unique")
        nodes.create_unique_constraint("nodes_identity", ["name", "public_key", "claim"])
    op.add_column("tokens", sa.Column("node", sa.String(128), nullable=False, server_default=""))
    op.add_column("tokens", sa.Column("revoked_at", sa.Double, nullable=False, server_default="0"))
    op.create_table(
        "used_challenges",
        sa.Column("hash", sa.String(64), primary_key=True),
        sa.Column("until", sa.Double, nullable=False),
    )
    op.create_table(
        "bus_credentials",
        sa.Column("user", sa.String(64), primary_key=True),
        sa.Column("node_id", sa.String(36), nullable=False),
        sa.Column("issued_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("revoked", sa.Boolean, nullable=False, server_default=sa.false()),
    )
    op.create_index("bus_credentials_node", "bus_credentials", ["node_id"])
    op.create_table(
        "cluster_values",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )
