"""Sessions of people and login codes, as rows beside the tokens they came from

Frontends of the previous version see roles that open nothing there, so they refuse them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tokens", sa.Column("grants", sa.String(16), nullable=False, server_default=""))
    op.add_column("tokens", sa.Column("parent", sa.String(36), nullable=False, server_default=""))
    op.add_column("tokens", sa.Column("address", sa.String(64), nullable=False, server_default=""))


def downgrade() -> None:
    op.execute("delete from tokens where role in ('session', 'login')")
    for column in ("grants", "parent", "address"):
        op.drop_column("tokens", column)
