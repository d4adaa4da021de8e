"""Signs of life in a narrow table

A heartbeat no longer writes the wide row of its node. Frontends of the previous version keep reading and writing
`nodes.last_heartbeat` and `nodes.capacity`: the newer of the two counts, and what is here is copied there now and then.
The indexes are for the look at health, which reads no reports, and for tokens that another frontend has just issued.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "node_liveness",
        sa.Column("node_id", sa.String(36), sa.ForeignKey("nodes.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("heard_at", sa.Double, nullable=False),
        sa.Column("capacity", sa.Text, nullable=False),
        sa.Column("report_digest", sa.String(64), nullable=False, server_default=""),
        sa.Column("boot_id", sa.String(64), nullable=False, server_default=""),
        sa.Column("sequence", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("mark", sa.Double, nullable=False, server_default="0"),
        sa.Column("running", sa.Integer, nullable=False, server_default="0"),
        sa.Column("processes", sa.Integer, nullable=False, server_default="0"),
    )
    op.execute("insert into node_liveness (node_id, heard_at, capacity) select id, last_heartbeat, capacity from nodes")
    op.create_index("nodes_health", "nodes", ["approved", "health", "bus_away"])
    op.create_index("nodes_token", "nodes", ["token_hash"])
    op.create_index("nodes_previous_token", "nodes", ["previous_token_hash"])


def downgrade() -> None:
    for index in ("nodes_health", "nodes_token", "nodes_previous_token"):
        op.drop_index(index, "nodes")
    op.execute(
        "update nodes set last_heartbeat = (select heard_at from node_liveness where node_id = nodes.id), "
        "capacity = (select capacity from node_liveness where node_id = nodes.id) "
        "where id in (select node_id from node_liveness)"
    )
    op.drop_table("node_liveness")
