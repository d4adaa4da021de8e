"""The revisions of the schema: which one a database has, which ones this program knows, and the way forward.

A database only moves forward. A revision that this program does not know was made by a newer one, and such a database
is refused, never touched: its rows may mean what this program does not understand.
"""

from __future__ import annotations

import threading
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from enginehouse.core.errors import Hopeless

NEWEST = "head"
# Alembic keeps its context in a global, so a process runs one migration at a time.
_migrating = threading.Lock()


def revisions() -> list[str]:
    """All revisions that this program knows, oldest first."""
    return [script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()][::-1]


def current(connection: Connection) -> str:
    """The revision of a database; "" if it has no tables of this program."""
    return MigrationContext.configure(connection).get_current_revision() or ""


def refuse_newer(connection: Connection) -> None:
    found = current(connection)
    if found and found not in (known := revisions()):
        raise Hopeless(
            f"cannot use the database: its schema {found} is newer than this program, which knows up to {known[-1]}. "
            "Start the newer Enginehouse again, or restore a backup from before its upgrade",
            code="newer_schema",
        )


def upgrade(connection: Connection, revision: str = NEWEST) -> None:
    """Migrate within the transaction of this connection, which the caller commits."""
    config = _config()
    config.attributes["connection"] = connection
    with _migrating:
        command.upgrade(config, revision)


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    return config
