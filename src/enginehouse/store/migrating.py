"""The revisions of the schema: which one a database has, which ones this program knows, and the way forward.

A database only moves forward. A revision that this program does not know was made by a newer one, and such a database
is refused, never touched: its rows may mean what this program does not understand. A database without tables gets
those of `schema` at once. Alembic is imported only to migrate: that and its steps take a fifth of a frontend's start.
"""

from __future__ import annotations

import threading
from pathlib import Path

import sqlalchemy
from sqlalchemy import Column, Connection, MetaData, PrimaryKeyConstraint, String, Table

from enginehouse.core.errors import Hopeless
from enginehouse.store.schema import metadata

NEWEST = "head"
_MIGRATIONS = Path(__file__).parent / "migrations"
# As Alembic makes it.
_VERSION = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
# Alembic keeps its context in a global, so a process runs one migration at a time.
_migrating = threading.Lock()


def revisions() -> list[str]:
    """All revisions that this program knows, oldest first."""
    return sorted(path.name.partition("_")[0] for path in (_MIGRATIONS / "versions").glob("[0-9]*.py"))


def current(connection: Connection) -> str:
    """The revision of a database; "" if it has no tables of this program."""
    if not sqlalchemy.inspect(connection).has_table("alembic_version"):
        return ""
    return str(connection.exec_driver_sql("select version_num from alembic_version").scalar() or "")


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
    if revision == NEWEST and current(connection) == revisions()[-1]:
        return
    if revision == NEWEST and _is_empty(connection):
        metadata.create_all(connection, checkfirst=False)
        _VERSION.create(connection)
        connection.execute(_VERSION.insert().values(version_num=revisions()[-1]))
        return
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    with _migrating:
        command.upgrade(config, revision)


def _is_empty(connection: Connection) -> bool:
    """Whether a database has none of the tables that the schema has, or ever had."""
    return not sqlalchemy.inspect(connection).get_table_names()
