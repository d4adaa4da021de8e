"""The meta name under which an operation joined an intent

The column has a server default, so that frontends of the previous version keep working.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("operation_intents", sa.Column("meta", sa.String(128), nullable=False, server_default=""))
