"""Pictures and sounds that a request names by URL, for engines that take bytes.

The URL is a stranger's, so it is fetched through the checked door like everything else: public addresses only, unless
the operator allows a host. What cannot be fetched is the request's fault, not the engine's.
"""

from __future__ import annotations

from enginehouse.core.errors import EnginehouseError, Invalid, TooLarge
from enginehouse.core.reference import shown_uri
from enginehouse.fetch.http.client import Client

MAX_MEDIA_BYTES = 20 * 1024 * 1024  # OpenAI's own limit for a picture
MEDIA_SECONDS = 20.0  # the client waits


async def fetch_media(client: Client, url: str) -> bytes:
    try:
        return (await client.document(url, limit_bytes=MAX_MEDIA_BYTES, total_seconds=MEDIA_SECONDS)).body
    except TooLarge as error:
        raise TooLarge(
            f"cannot use {shown_uri(url)}: it is larger than {MAX_MEDIA_BYTES // 1024**2} MiB", param="messages"
        ) from error
    except EnginehouseError as error:
        raise Invalid(
            f"cannot fetch {shown_uri(url)}: {error.message}; or send it as a data: URL", code="media", param="messages"
        ) from error
