"""Alembic's entry: migrations run on the connection that `Store` hands over, inside its lock."""

from __future__ import annotations

from alembic import context

from enginehouse.store.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
