"""The tokens that a cluster starts with: from the settings, from files, or made at the first start.

They are stored under fixed names, one per role. If a cluster has no token of a role, the first frontend makes one and
saves it in a file. The file is written first: a token known only to a dead process would lock every operator out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from enginehouse.frontend.fleet.tokens import Keys, Role, new_token
from enginehouse.host import disk

log = logging.getLogger(__name__)


async def take_tokens(keys: Keys, given: Mapping[Role, str], directory: Path) -> None:
    """Store the tokens of these roles. An empty one is read from its file, or made if the cluster has none."""
    for role, token in given.items():
        path = directory / f"{role}.token"
        if token or path.exists():
            await keys.create(role, role, token or path.read_text().strip())
            continue
        made = new_token(role)
        disk.write_atomic(path, f"{made}\n".encode(), 0o600)
        if await keys.make_first(role, made):
            log.warning("token.made role=%s file=%s", role, path)
        else:
            path.unlink(missing_ok=True)
    await keys.step()
