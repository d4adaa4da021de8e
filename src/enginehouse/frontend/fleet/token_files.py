"""The tokens that a cluster starts with: from the settings, from files, or made at the first start.

They are stored under fixed names, one per role. If a cluster has no token of a role, the first frontend makes one and
saves it in a file. The file is written first: a token known only to a dead process would lock every operator out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from enginehouse.core.errors import Invalid
from enginehouse.frontend.fleet.nodes import token_hash
from enginehouse.frontend.fleet.tokens import Keys, Role, Rotated, new_token
from enginehouse.host import disk

log = logging.getLogger(__name__)


def given_token(role: Role, setting: str, directory: Path) -> str:
    """The token of a setting, which may name a file as `@FILE`, else of the file in `directory`; "" if there is none.

    A file that is named must have one: who put nothing into it by mistake does not want another token in its place.
    """
    if setting and not setting.startswith("@"):
        return setting
    named = Path(setting[1:]) if setting else directory / f"{role}.token"
    problem = f"cannot read the {role} token from {named}"
    try:
        token = named.read_text().strip()
    except FileNotFoundError:
        if setting:
            raise Invalid(f"{problem}: there is no such file", code="invalid_setting") from None
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"{problem}: {error}", code="invalid_setting") from error
    if setting and not token:
        raise Invalid(f"{problem}: the file is empty; write the token into it", code="invalid_setting")
    return token


async def take_tokens(keys: Keys, given: Mapping[Role, str], directory: Path) -> None:
    """Store the tokens of these roles. An empty one is read from its file, or made if the cluster has none."""
    for role, setting in given.items():
        path = directory / f"{role}.token"
        token = given_token(role, setting, directory)
        if token:
            await keys.create(role, role, token)
            continue
        made = new_token(role)
        disk.write_atomic(path, f"{made}\n".encode(), 0o600)
        if await keys.make_first(role, made):
            log.warning("token.made role=%s file=%s", role, path)
        else:
            path.unlink(missing_ok=True)
    await keys.step()


def renew_token_file(directory: Path, rotated: Rotated) -> bool:
    """Put a rotated token into the file that had the old one, so that the next start finds a valid one. Returns whether
    there was such a file. Blocks.
    """
    path = directory / f"{rotated.row.role}.token"
    try:
        held = path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return False
    if token_hash(held) != rotated.row.hash:
        return False
    disk.write_atomic(path, f"{rotated.token}\n".encode(), 0o600)
    log.warning("token.renewed role=%s file=%s", rotated.row.role, path)
    return True
