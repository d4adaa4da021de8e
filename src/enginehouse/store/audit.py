"""Rows of the audit. They are only added and, when they are old, deleted."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import and_, bindparam, delete, or_, select

from enginehouse.core.audit import AuditQuery, AuditRecord
from enginehouse.core.errors import NotFound
from enginehouse.core.name import shown
from enginehouse.store.db import Connection
from enginehouse.store.rows import ignoring_known
from enginehouse.store.schema import audit

_ADD = ignoring_known(audit)
_PRUNE = delete(audit).where(audit.c.at < bindparam("before"))


def add(connection: Connection, records: Sequence[AuditRecord]) -> None:
    """Add records. Those that are there are left as they are: the answer to a commit may have been lost."""
    if records:
        connection.execute(_ADD[connection.dialect.name], [msgspec.structs.asdict(one) for one in records])


def page(connection: Connection, asked: AuditQuery) -> list[AuditRecord]:
    """Records, newest first."""
    query = select(audit).order_by(audit.c.at.desc(), audit.c.id.desc()).limit(asked.limit)
    if asked.who:
        query = query.where(
            or_(audit.c.who == asked.who, audit.c.token_id == asked.who, audit.c.session_id == asked.who)
        )
    if asked.path:
        query = query.where(audit.c.path.startswith(asked.path, autoescape=True))
    if asked.before:
        at = connection.execute(select(audit.c.at).where(audit.c.id == asked.before)).scalar_one_or_none()
        if at is None:
            raise NotFound(
                f"cannot list the audit before {shown(asked.before)}: there is no such record", param="before"
            )
        same_moment = and_(audit.c.at == at, audit.c.id < asked.before)
        query = query.where(audit.c.at <= at, or_(audit.c.at < at, same_moment))
    return [AuditRecord(**row) for row in connection.execute(query).mappings()]


def prune(connection: Connection, before: float) -> int:
    """Delete what happened before then; return how many rows."""
    return connection.execute(_PRUNE, {"before": before}).rowcount
