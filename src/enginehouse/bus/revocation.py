"""Tells the embedded server which credentials are revoked: a new version of the account, through the system account.

The server cuts off the connections of revoked users as it takes it. The list is whole every time, so telling it again
is harmless, and a server that was started anew is told again.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping

import msgspec
import nats.errors
import nkeys
from msgspec import Struct
from nats.aio.client import Client

from enginehouse.bus.credentials import BusAccounts, mint_user
from enginehouse.core.errors import Unavailable
from enginehouse.core.subjects import Permissions

UPDATE = "$SYS.REQ.CLAIMS.UPDATE"
INBOX = "_INBOX.eh-revocation"
LIFE_SECONDS = 60.0  # of the credential for one exchange


class _Told(Struct, frozen=True):
    code: int = 0
    message: str = ""


class _Answer(Struct, frozen=True):
    """Of one server: `data` where it took it, `error` where it did not."""

    data: _Told = _Told()
    error: _Told = _Told()


async def revoke(url: str, accounts: BusAccounts, revoked: Mapping[str, int], *, limit_seconds: float) -> None:
    """`Unavailable` where the server did not say that it has taken it."""
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
                signature_cb=lambda nonce: base64.b64encode(
                    nkeys.from_seed(credential.seed.encode()).sign(nonce.encode())
                ),
            )
            try:
                reply = await client.request(UPDATE, accounts.account_jwt(revoked).encode(), timeout=limit_seconds)
            finally:
                await client.close()
        answer = msgspec.json.decode(reply.data, type=_Answer)
    except (nats.errors.Error, OSError, TimeoutError, msgspec.DecodeError) as error:
        raise Unavailable(f"cannot revoke credentials on the bus: {error!r}", code="bus_unavailable") from error
    if answer.data.code != 200:
        why = answer.error.message or answer.data.message or "no reason given"
        raise Unavailable(f"cannot revoke credentials on the bus: {why}", code="bus_unavailable")
