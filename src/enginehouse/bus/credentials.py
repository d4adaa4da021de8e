"""Accounts and credentials of the bus: NATS accounts, and one credential (a signed JWT and its seed) per node and per
frontend.

Permissions come from `core.subjects` only, so that they cannot diverge from the code. Seeds are files of mode 0600 and
never leave this machine, except a user's own seed, which is given to that user once. The JWTs of operator and accounts
are derived from the seeds at every start. The system account has one purpose: to tell the embedded server which
credentials are revoked.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct

from enginehouse.bus import nkey
from enginehouse.bus.nkey import KeyPair
from enginehouse.core.errors import Hopeless
from enginehouse.core.ids import NodeId
from enginehouse.core.subjects import Permissions, token

LIFE_SECONDS = 3600.0  # of a worker's credential: a stolen or unrevoked one expires soon
# A worker may reply to a request even if the reply subject is outside its own prefix, as with frontends of earlier
# versions. One reply per request; the server forgets an unanswered one after the lifetime of a credential.
_RESPONSES = {"max": 1, "ttl": int(LIFE_SECONDS * 1e9)}


class BusAccounts(Struct, frozen=True, kw_only=True):
    """The keys of the embedded server. The account's seed signs users; the operator's only signs the accounts."""

    operator_seed: str
    account_seed: str
    system_seed: str

    @property
    def account(self) -> str:
        """The public key of the account, as the server's configuration expects it."""
        return _public(self.account_seed)

    @property
    def system(self) -> str:
        return _public(self.system_seed)

    def operator_jwt(self) -> str:
        claims = {"type": "operator", "system_account": self.system}
        return _sign(self.operator_seed, subject=_public(self.operator_seed), name="enginehouse", claims=claims)

    def account_jwt(self, revoked: Mapping[str, int] | None = None) -> str:
        """`revoked` maps public keys of users to a Unix time: credentials issued to them before it are invalid."""
        claims: dict[str, object] = {"type": "account", "limits": _UNLIMITED}
        if revoked:
            claims["revocations"] = dict(revoked)
        return _sign(self.operator_seed, subject=self.account, name="enginehouse", claims=claims)

    def system_jwt(self) -> str:
        claims = {"type": "account", "limits": _UNLIMITED}
        return _sign(self.operator_seed, subject=self.system, name="system", claims=claims)


# An absent limit means zero to the server; -1 is "no limit". JetStream stays absent: the bus stores nothing.
_UNLIMITED = {
    "subs": -1,
    "data": -1,
    "payload": -1,
    "imports": -1,
    "exports": -1,
    "wildcards": True,
    "conn": -1,
    "leaf": -1,
}


class MintedUser(Struct, frozen=True):
    """A user of the account. `expires_at` is in seconds since 1970; None if it does not expire."""

    jwt: str
    seed: str
    user: str  # its public key
    expires_at: float | None


def worker_name(node_id: NodeId) -> str:
    return f"enginehouse-backend-{token(node_id)}"


def load_or_create(directory: Path) -> BusAccounts:
    """Load the accounts; create them at the first call, each seed in its own file, so that a crash loses nothing."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    operator = _kept_seed(directory / "operator.seed", nkey.OPERATOR)
    account = _kept_seed(directory / "account.seed", nkey.ACCOUNT)
    system = _kept_seed(directory / "system.seed", nkey.ACCOUNT)
    return BusAccounts(operator_seed=operator, account_seed=account, system_seed=system)


def load_existing(directory: Path) -> BusAccounts | None:
    """Load the accounts from `directory`; None if they were not created, because the bus is not the embedded server."""
    return load_or_create(directory) if (directory / "system.seed").exists() else None


def mint_user(
    account_seed: str, name: str, permissions: Permissions, *, life_seconds: float | None = None
) -> MintedUser:
    """Create a user of the account."""
    seed = _new_seed(nkey.USER)
    user = _public(seed)
    expires_at = None if life_seconds is None else time.time() + life_seconds
    claims: dict[str, object] = {
        "type": "user",
        "pub": {"allow": permissions.publish},
        "sub": {"allow": permissions.subscribe},
        "subs": -1,
        "data": -1,
        "payload": -1,
    }
    if permissions.answers:
        claims["resp"] = _RESPONSES
    jwt = _sign(account_seed, subject=user, name=name, expires_at=expires_at, claims=claims)
    return MintedUser(jwt, seed, user, expires_at)


def _new_seed(prefix: int) -> str:
    return nkey.encode_seed(secrets.token_bytes(32), prefix)


@cache
def _issuer(seed: str) -> KeyPair:
    """The key pair of an account or operator: deriving it costs as much as a signature."""
    return KeyPair(seed)


def _public(seed: str) -> str:
    return KeyPair(seed).public


def _sign(
    issuer_seed: str, *, subject: str, name: str, claims: Mapping[str, object], expires_at: float | None = None
) -> str:
    """A NATS JWT of version 2: Ed25519 over `header.payload`, with the hash of the claims as its id."""
    issuer = _issuer(issuer_seed)
    body: dict[str, object] = {
        "iat": int(time.time()),
        "iss": issuer.public,
        "name": name,
        "sub": subject,
        "nats": {**claims, "version": 2},
    }
    if expires_at is not None:
        body["exp"] = int(expires_at)
    digest = hashlib.sha256(msgspec.json.encode(body)).digest()
    body["jti"] = base64.b32encode(digest).rstrip(b"=").decode()
    signed = f"{_HEADER}.{_url64(msgspec.json.encode(body))}"
    return f"{signed}.{_url64(issuer.sign(signed.encode()))}"


def _url64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


_HEADER = _url64(b'{"typ":"JWT","alg":"ed25519-nkey"}')


def _kept_seed(path: Path, prefix: int) -> str:
    if not path.exists():
        write_private(path, _new_seed(prefix) + "\n")
    seed = path.read_text(errors="replace").strip()
    try:
        kept, _ = nkey.decode_seed(seed)
    except ValueError as error:
        raise _bad_seed(path) from error
    if kept != prefix:
        raise _bad_seed(path)
    return seed


def _bad_seed(path: Path) -> Hopeless:
    return Hopeless(
        f"cannot read the bus key in {path.name}: it is damaged. Restore it, "
        "or remove it to create a new one; every worker must then join again"
    )


def sign_nonce(seed: str, nonce: str) -> bytes:
    """The signature with which a client proves to the server that it has the seed of its JWT."""
    return base64.b64encode(KeyPair(seed).sign(nonce.encode()))


def write_private(path: Path, content: str) -> None:
    """Write atomically. The file is never readable by others, not even while it is written."""
    staging = path.with_name(path.name + ".new")
    staging.unlink(missing_ok=True)
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    staging.rename(path)
