"""The canary phase of an upgrade, and failed requests that are no fault of their clients

The columns have server defaults, so that frontends of the previous version keep working. Held intents are due in the
far future, so those frontends do not send them; they count no failures.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("operations", sa.Column("canary", sa.Text, nullable=False, server_default="null"))
    op.add_column("operations", sa.Column("canary_phase", sa.String(16), nullable=False, server_default=""))
    op.create_index("operations_canary", "operations", ["canary_phase"])
    op.add_column("usage_counts", sa.Column("failures", sa.BigInteger, nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("usage_counts", "failures")
    op.drop_index("operations_canary", "operations")
    op.drop_column("operations", "canary_phase")
    op.drop_column("operations", "canary")
