"""Pictures by URL: fetched through the checked door, and refused in a sentence that the client understands."""

from __future__ import annotations

import pytest
from tests.fetch.http.test_client import serving

from enginehouse.core.errors import Invalid, TooLarge
from enginehouse.fetch import media
from enginehouse.fetch.http.addresses import Rules
from enginehouse.fetch.media import fetch_media


async def test_a_picture_is_fetched() -> None:
    async with serving() as (client, server):
        assert await fetch_media(client, f"{server.url}/x") == b"hello"


async def test_a_picture_that_is_not_there_or_too_large_is_the_fault_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as (client, server):
        with pytest.raises(Invalid) as missing:
            await fetch_media(client, f"{server.url}/missing")
        assert missing.value.param == "messages"
        assert "data: URL" in missing.value.message
        monkeypatch.setattr(media, "MAX_MEDIA_BYTES", 4)
        with pytest.raises(TooLarge):
            await fetch_media(client, f"{server.url}/x")


async def test_a_picture_inside_our_own_network_is_not_fetched() -> None:
    async with serving(Rules()) as (client, server):
        with pytest.raises(Invalid):
            await fetch_media(client, f"{server.url}/x")
        assert server.requests == []
