"""Revocation of credentials: sends the embedded server a new version of the account through the system account.

The server then disconnects the revoked users. The list is always complete, so sending it again is idempotent; it is
sent again after a restart of the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from enginehouse.bus.credentials import BusAccounts, mint_user, sign_nonce
from enginehouse.bus.library import Client, errors
from enginehouse.core.errors import Unavailable
from enginehouse.core.subjects import Permissions

UPDATE = "$SYS.REQ.CLAIMS.UPDATE"
INBOX = "_INBOX.eh-revocation"
LIFE_SECONDS = 60.0  # of the credential for one exchange


class _ServerStatus(Struct, frozen=True):
    code: int = 0
    message: str = ""


class _Answer(Struct, frozen=True):
    """The answer of one server: `data` on success, `error` on failure."""

    data: _ServerStatus = _ServerStatus()
    error: _ServerStatus = _ServerStatus()


async def revoke(url: str, accounts: BusAccounts, revoked: Mapping[str, int], *, limit_seconds: float) -> None:
    """Raise `Unavailable` unless the server confirms the update."""
    allowed = Permissions(publish=(UPDATE,), subscribe=(f"{INBOX}.>",))
    credential = mint_user(accounts.system_seed, "enginehouse-revocation", allowed, life_seconds=LIFE_SECONDS)
    client = Client()
    try:
        async with asyncio.timeout(limit_seconds):
            await client.connect(
                servers=[url],
                name="enginehouse-revocation",
                allow_reconnect=False,
                connect_timeout=int(limit_seconds) or 1,
                inbox_prefix=INBOX.encode(),
                user_jwt_cb=credential.jwt.encode,
                signature_cb=lambda nonce: sign_nonce(credential.seed, nonce),
            )
            try:
                reply = await client.request(UPDATE, accounts.account_jwt(revoked).encode(), timeout=limit_seconds)
            finally:
                await client.close()
        answer = msgspec.json.decode(reply.data, type=_Answer)
    except (errors.Error, OSError, TimeoutError, msgspec.DecodeError) as error:
        raise Unavailable(f"cannot revoke credentials on the bus: {error!r}", code="bus_unavailable") from error
    if answer.data.code != 200:
        why = answer.error.message or answer.data.message or "no reason given"
        raise Unavailable(f"cannot revoke credentials on the bus: {why}", code="bus_unavailable")
