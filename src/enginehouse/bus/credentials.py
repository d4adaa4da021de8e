"""Who may say what on the bus: NATS accounts, and one credential (a signed JWT and its seed) per node and per
frontend.

The permissions are built from the subjects of `core.wire`, never typed here, so that the list and the code
cannot drift apart. Seeds are files of mode 0600 and never leave this machine, except a user's own seed, which
is handed to that user once. The JWTs of operator and account are made anew from the seeds at every start:
there is nothing else to keep.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import time
from pathlib import Path

import msgspec
import nkeys
from msgspec import Struct

from enginehouse.core import wire
from enginehouse.core.errors import Hopeless

INBOXES = "_INBOX.>"  # LocalAI's Go workers and nats-py take their reply subjects under this prefix


class Permissions(Struct, frozen=True, kw_only=True):
    """Allow lists; what is not listed is denied."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


class BusAccounts(Struct, frozen=True, kw_only=True):
    """The keys of the embedded server. The account's seed makes users; the operator's only vouches for the
    account."""

    operator_seed: str
    account_seed: str
    operator_jwt: str
    account_jwt: str

    @property
    def account(self) -> str:
        """The public name of the account, as the server's configuration wants it."""
        return _public(self.account_seed)


def worker_permissions(node_id: str) -> Permissions:
    """A worker hears its own commands, tells its own progress and answers. The same list as LocalAI gives its
    workers."""
    return Permissions(
        subscribe=(wire.node_subject(node_id, ">"), INBOXES),
        publish=(
            # The op id is one token of the subject; `token` would turn the wildcard into a dash.
            wire.progress_subject(node_id, "OP").replace("OP", "*"),
            wire.node_subject(node_id, "files.>"),
            INBOXES,
        ),
    )


def frontend_permissions() -> Permissions:
    """A frontend commands every node and hears progress and replies; it never answers a command itself."""
    return Permissions(
        publish=tuple(f"nodes.*.{verb}" for verb in wire.WORKER_SUBJECTS),
        subscribe=(wire.ALL_PROGRESS, INBOXES),
    )


def worker_name(node_id: str) -> str:
    return f"enginehouse-backend-{wire.token(node_id)}"


def load_or_create(directory: Path) -> BusAccounts:
    """The accounts kept in `directory`, made at the first call. Each seed is a file of its own, so a crash
    between them loses nothing."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    operator = _kept_seed(directory / "operator.seed", nkeys.PREFIX_BYTE_OPERATOR)
    account = _kept_seed(directory / "account.seed", nkeys.PREFIX_BYTE_ACCOUNT)
    return BusAccounts(
        operator_seed=operator,
        account_seed=account,
        operator_jwt=_sign(operator, subject=_public(operator), name="enginehouse", claims={"type": "operator"}),
        account_jwt=_sign(
            operator,
            subject=_public(account),
            name="enginehouse",
            # Absent limits mean zero to the server; -1 is "no limit". JetStream stays absent: the bus keeps
            # nothing.
            claims={
                "type": "account",
                "limits": {
                    "subs": -1,
                    "data": -1,
                    "payload": -1,
                    "imports": -1,
                    "exports": -1,
                    "wildcards": True,
                    "conn": -1,
                    "leaf": -1,
                },
            },
        ),
    )


def mint_user(
    account_seed: str, name: str, permissions: Permissions, *, expires_at: float | None = None
) -> tuple[str, str]:
    """A new user of the account: its JWT and its seed. Without `expires_at` (seconds since 1970) it is valid
    until the account goes."""
    seed = _new_seed(nkeys.PREFIX_BYTE_USER)
    jwt = _sign(
        account_seed,
        subject=_public(seed),
        name=name,
        expires_at=expires_at,
        claims={
            "type": "user",
            "pub": {"allow": permissions.publish},
            "sub": {"allow": permissions.subscribe},
            "subs": -1,
            "data": -1,
            "payload": -1,
        },
    )
    return jwt, seed


def _new_seed(prefix: int) -> str:
    return str(nkeys.encode_seed(secrets.token_bytes(32), prefix).decode())


def _public(seed: str) -> str:
    return str(nkeys.from_seed(seed.encode()).public_key.decode())


def _sign(
    issuer_seed: str, *, subject: str, name: str, claims: dict[str, object], expires_at: float | None = None
) -> str:
    """A NATS JWT of version 2: Ed25519 over `header.payload`, with the hash of the claims as its id."""
    body: dict[str, object] = {
        "iat": int(time.time()),
        "iss": _public(issuer_seed),
        "name": name,
        "sub": subject,
        "nats": {**claims, "version": 2},
    }
    if expires_at is not None:
        body["exp"] = int(expires_at)
    digest = hashlib.sha256(msgspec.json.encode(body)).digest()
    body["jti"] = base64.b32encode(digest).rstrip(b"=").decode()
    signed = f"{_HEADER}.{_url64(msgspec.json.encode(body))}"
    signature: bytes = nkeys.from_seed(issuer_seed.encode()).sign(signed.encode())
    return f"{signed}.{_url64(signature)}"


def _url64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


_HEADER = _url64(b'{"typ":"JWT","alg":"ed25519-nkey"}')


def _kept_seed(path: Path, prefix: int) -> str:
    if not path.exists():
        _write_secret(path, _new_seed(prefix) + "\n")
    seed = path.read_text(errors="replace").strip()
    try:
        kept, _ = nkeys.decode_seed(seed.encode())
    except (nkeys.ErrInvalidSeed, nkeys.ErrInvalidPrefixByte, ValueError) as error:
        raise _bad_seed(path) from error
    if kept != prefix:
        raise _bad_seed(path)
    return seed


def _bad_seed(path: Path) -> Hopeless:
    return Hopeless(
        f"cannot read the key of the bus in {path.name}: it is damaged. Restore it, "
        "or remove it to make a new one (every worker then joins again)"
    )


def _write_secret(path: Path, content: str) -> None:
    """Whole or not at all, and never readable by others, not even while it is written."""
    staging = path.with_name(path.name + ".new")
    staging.unlink(missing_ok=True)
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    staging.rename(path)
