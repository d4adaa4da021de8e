"""Alembic's entry point: runs migrations on the connection that `Store` passes, inside its lock."""

from __future__ import annotations

from alembic import context

from enginehouse.store.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
