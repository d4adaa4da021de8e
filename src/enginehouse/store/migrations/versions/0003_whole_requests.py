"""Request options of operations, lanes, retries, detached intents, idempotency keys

All new columns have server defaults, so that frontends of the previous version keep working.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_ENDED = """
update operations set ended_as = case
    when error_code <> '' then 'failed'
    when exists (select 1 from operation_intents l join intents i on i.id = l.intent_id
                 where l.operation_id = operations.id and i.state = 'failed')
        then case when exists (select 1 from operation_intents l join intents i on i.id = l.intent_id
                               where l.operation_id = operations.id and i.state = 'succeeded')
             then 'partial' else 'failed' end
    else 'succeeded' end
where not is_steered and not exists (
    select 1 from operation_intents l join intents i on i.id = l.intent_id
    where l.operation_id = operations.id and i.state in ('accepted', 'running', 'waiting'))
"""


def upgrade() -> None:
    op.add_column("operations", sa.Column("asked", sa.Text, nullable=False, server_default="{}"))
    op.add_column("operations", sa.Column("retry_of", sa.String(36), nullable=False, server_default=""))
    op.add_column("operations", sa.Column("dismissed", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("operations", sa.Column("ended_as", sa.String(16), nullable=False, server_default=""))
    op.add_column("intents", sa.Column("lane", sa.String(36), nullable=False, server_default=""))
    op.add_column("intents", sa.Column("lane_width", sa.Integer, nullable=False, server_default="0"))
    op.add_column("intents", sa.Column("kind", sa.String(32), nullable=False, server_default=""))
    op.add_column("operation_intents", sa.Column("detached", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_index("operations_ended", "operations", ["ended_as", "created_at"])
    op.drop_index("intents_node", "intents")
    op.create_index("intents_node", "intents", ["node_id", "state", "due_at"])
    op.create_index("intents_lane", "intents", ["lane", "state"])
    op.create_table(
        "idempotency_keys",
        sa.Column("author", sa.String(128), primary_key=True),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("body_hash", sa.String(64), nullable=False),
        sa.Column("operation_id", sa.String(36), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    op.create_index("idempotency_keys_created", "idempotency_keys", ["created_at"])
    # Approximate for loads that moved to a second node: this column is only for searching, and the status is computed.
    op.execute(_ENDED)
