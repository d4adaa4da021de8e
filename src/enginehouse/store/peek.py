"""A look into a SQLite database that is not open yet, by a program that must not load the database code.

`up` looks for the keys that the database belongs to before it makes any. It writes nothing, and a file that it cannot
read counts as having none: the frontend, which opens it next, says what is wrong with it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from urllib.parse import quote


def key_record(path: Path, name: str) -> tuple[str, list[str]]:
    """The record of keys under this name, "" without one, and the hashes of tokens that are not revoked."""
    if not path.exists():
        return "", []
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=2.0)) as opened:
            row = opened.execute("select value from cluster_values where name = ?", (name,)).fetchone()
            hashes = opened.execute("select hash from tokens where revoked_at = 0").fetchall()
    except sqlite3.Error:
        return "", []
    return (row[0] if row else ""), [one for (one,) in hashes]
