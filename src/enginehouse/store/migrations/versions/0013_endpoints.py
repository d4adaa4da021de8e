"""Whether a model runs on a server elsewhere, as a column

The column has a server default, so that frontends of the previous version keep working. A model with an endpoint that
such a frontend adds meanwhile is found after it is added again.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("models", sa.Column("has_endpoint", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_index("models_endpoint", "models", ["has_endpoint"])
    models = sa.table("models", sa.column("definition", sa.Text), sa.column("has_endpoint", sa.Boolean))
    # Definitions are written without spaces. A configuration may have such a key of its own; the reader looks again.
    named = models.c.definition.contains('"endpoint":"')
    op.execute(models.update().where(named).values(has_endpoint=True))


def downgrade() -> None:
    op.drop_index("models_endpoint", "models")
    op.drop_column("models", "has_endpoint")
