"""The keys that a database belongs to. Pure.

Tokens of workers, sessions and credentials count only together with files of the data directory: a database alone, or
beside other keys, would lock out operators and workers one by one, hours later. So the database remembers a fingerprint
of each file, and a server whose files are missing or others refuses to start, and names them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import sha256

import msgspec

from enginehouse.core.errors import Hopeless

RECORD = "keys"  # the name of the value in the database
TOKENS = ("admin.token", "join.token")
NODE_KEY = "node.key"
SEEDS = ("bus/operator.seed", "bus/account.seed", "bus/system.seed")
KEY_FILES = (*TOKENS, NODE_KEY, *SEEDS)
NEW_KEYS = "; to go on with new keys, start `up` once with --new-keys: approved workers come back by themselves"
DIGITS = 16  # of a hash of 256 random bits: enough to tell two apart, and nothing to guess by
_RECORD = msgspec.json.Decoder(dict[str, str])


def fingerprint_of(content: bytes) -> str:
    """Of a token it is the beginning of the hash that the database has."""
    return sha256(content.strip()).hexdigest()[:DIGITS]


def read_record(text: str) -> dict[str, str]:
    """The fingerprints by file; empty in a database that has none yet."""
    return _RECORD.decode(text) if text else {}


def record_text(recorded: Mapping[str, str], files: Mapping[str, bytes]) -> str:
    """The record with the files that are there now."""
    now = {name: fingerprint_of(content) for name, content in files.items() if name in KEY_FILES}
    return msgspec.json.encode(dict(sorted({**recorded, **now}.items()))).decode()


def missing(
    recorded: Mapping[str, str],
    files: Collection[str],
    valid_tokens: Collection[str],
    names: Collection[str] = KEY_FILES,
) -> list[str]:
    """The files that are gone. `valid_tokens` has hashes: the file of a token that was revoked may be gone."""
    gone = [name for name in KEY_FILES if name in names and name in recorded and name not in files]
    return [name for name in gone if name not in TOKENS or any(one.startswith(recorded[name]) for one in valid_tokens)]


def others(recorded: Mapping[str, str], files: Mapping[str, bytes]) -> list[str]:
    """The files that are not those of the database. A token may be another one: operators replace it."""
    return [
        name
        for name in (NODE_KEY, *SEEDS)
        if name in recorded and name in files and fingerprint_of(files[name]) != recorded[name]
    ]


def refusal(place: str, gone: list[str], wrong: list[str], way_on: str) -> Hopeless:
    """`way_on`: how to go on without the keys."""
    found = []
    if gone:
        found.append(f"{_listed(gone)} {'is' if len(gone) == 1 else 'are'} missing in {place}")
    if wrong:
        found.append(f"{_listed(wrong)} in {place} {'belongs' if len(wrong) == 1 else 'belong'} to another database")
    return Hopeless(
        f"cannot use this database without its keys: {', and '.join(found)}. Put the files back, or restore a backup "
        f"with `enginehouse restore FILE`{way_on}",
        code="keys_missing",
    )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
