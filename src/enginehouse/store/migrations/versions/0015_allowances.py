"""What tokens may use and until when, what they have used, and counts of the last minute

The new columns have server defaults, so that frontends of the previous version keep working. Those frontends ignore
the limits of a token until they are upgraded.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tokens", sa.Column("models", sa.Text, nullable=False, server_default="[]"))
    op.add_column("tokens", sa.Column("requests_per_minute", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("tokens", sa.Column("tokens_per_minute", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("tokens", sa.Column("expires_at", sa.Double, nullable=False, server_default="0"))
    op.create_table(
        "rate_counts",
        sa.Column("token_id", sa.String(36), primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "usage_counts",
        sa.Column("hour", sa.BigInteger, primary_key=True),
        sa.Column("token_id", sa.String(36), primary_key=True),
        sa.Column("model", sa.String(255), primary_key=True),
        sa.Column("node", sa.String(512), primary_key=True),
        sa.Column("token_name", sa.String(128), nullable=False),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("errors", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    )
