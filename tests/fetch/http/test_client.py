"""The outbound client against real sockets: rules, redirects, limits, silence."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.fetch.faults import Answer, Cut, Drop, Hang, Header, Redirect, Stall
from tests.fetch.faulty import Faulty, faulty
from tests.fetch.http.test_addresses import INSIDE, SMUGGLED
from tests.fetch.images import run
from tests.fetch.pulling import LOOPBACK, STALL_SECONDS

from enginehouse.core.errors import Denied, EnginehouseError, Hopeless, Invalid, NotFound, TooLarge, Upstream
from enginehouse.fetch.http.addresses import Rules
from enginehouse.fetch.http.client import Client, OutboundRequest


@asynccontextmanager
async def serving(rules: Rules = LOOPBACK) -> AsyncIterator[tuple[Client, Faulty]]:
    client = Client(rules, stall_seconds=STALL_SECONDS, user_agent="test/1")
    async with faulty() as server:
        server.files["/x"] = b"hello"
        yield client, server
        await client.close()


async def test_a_document_is_read_and_its_connection_kept() -> None:
    async with serving() as (client, server):
        for _ in range(3):
            document = await client.document(f"{server.url}/x", limit_bytes=100)
        assert (document.status, document.body, document.url) == (200, b"hello", f"{server.url}/x")
        assert "etag" in document.headers
        assert server.connections == 1
        asked = server.requests[0].headers
        assert asked["user-agent"] == "test/1"
        assert asked["accept-encoding"] == "identity"


async def test_what_has_not_changed_is_an_answer_and_not_an_error() -> None:
    async with serving() as (client, server):
        tag = (await client.document(f"{server.url}/x", limit_bytes=100)).headers["etag"]
        again = await client.document(f"{server.url}/x", limit_bytes=100, headers={"If-None-Match": tag})
        assert (again.status, again.body) == (304, b"")


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (404, NotFound, "not_found"),
        (410, NotFound, "not_found"),
        (403, Denied, "forbidden"),
        (418, Hopeless, "upstream_error"),
        (429, Upstream, "upstream_error"),
        (503, Upstream, "upstream_error"),
    ],
)
async def test_every_refusal_becomes_its_class(status: int, kind: type[EnginehouseError], code: str) -> None:
    async with serving() as (client, server):
        server.plan(Answer(status, b"secret words of theirs", {"Retry-After": "7"}))
        with pytest.raises(kind) as caught:
            await client.document(f"{server.url}/x?token=hunter2", limit_bytes=100)
    assert (type(caught.value), caught.value.code) == (kind, code)
    assert caught.value.retry_after_seconds == (7 if kind is Upstream else None)
    assert "secret words" not in caught.value.message
    assert "hunter2" not in caught.value.message


async def test_no_connection_is_made_to_what_is_not_listed() -> None:
    async with serving(Rules()) as (client, canary):
        port = canary.address.rpartition(":")[2]
        inside = [url.replace("/", f":{port}/") if url.endswith("1/") else url for url in INSIDE]
        for url in [canary.url, f"http://localhost:{port}/x", f"http://[::ffff:127.0.0.1]:{port}/", *inside, *SMUGGLED]:
            with pytest.raises(Invalid) as caught:
                await client.document(url, limit_bytes=100)
            assert caught.value.code in ("uri_not_allowed", "invalid_uri")
        assert canary.connections == 0


async def test_a_name_is_resolved_and_its_addresses_are_checked() -> None:
    async with serving(Rules()) as (client, canary):
        url = f"http://localhost:{canary.address.rpartition(':')[2]}/x"
        with pytest.raises(Invalid) as caught:
            await client.document(url, limit_bytes=100)
        assert caught.value.code == "uri_not_allowed"
        assert canary.connections == 0
        listed = Client(Rules(allowed=("localhost",)))
        for same in (url, url.replace("localhost", "LOCALHOST")):
            assert (await listed.document(same, limit_bytes=100)).body == b"hello"
        await listed.close()


async def test_a_redirect_is_checked_like_any_other_url() -> None:
    async with faulty() as canary, serving() as (_, server):
        client = Client(Rules(allowed=(server.address,)))
        elsewhere = [
            f"{canary.url}/x",
            "http://169.254.169.254/x",
            "file:///etc/passwd",
            "//127.0.0.2/x",
            "http://2130706433/",
        ]
        for target in elsewhere:
            server.plan(Redirect(target if "/" in target[8:] else target + "/"))
            with pytest.raises(Invalid) as caught:
                await client.document(f"{server.url}/x", limit_bytes=100)
            assert caught.value.code == "uri_not_allowed"
        assert canary.connections == 0
        await client.close()


async def test_credentials_stay_with_the_host_they_are_for() -> None:
    async with faulty() as other, serving() as (client, server):
        other.files["/x"] = b"there"
        secret = {"Authorization": "Bearer secret", "Cookie": "a=b", "X-Kept": "1"}
        server.plan(Redirect(f"{server.url}/x"), path="/same")
        assert (await client.document(f"{server.url}/same", limit_bytes=100, headers=secret)).body == b"hello"
        assert server.requests[-1].headers["authorization"] == "Bearer secret"
        server.plan(Redirect(other.url), path="/x")
        assert (await client.document(f"{server.url}/x", limit_bytes=100, headers=secret)).body == b"there"
        seen = other.requests[0].headers
        assert "authorization" not in seen
        assert "cookie" not in seen
        assert seen["x-kept"] == "1"
        # Not even when the other host sends us back.
        other.plan(Redirect(server.url), path="/x")
        server.plan(Redirect(other.url), path="/x")
        await client.document(f"{server.url}/x", limit_bytes=100, headers=secret)
        assert "authorization" not in server.requests[-1].headers


async def test_cookies_are_neither_kept_nor_sent() -> None:
    # Under a name, because libraries that keep cookies do not keep those of bare addresses.
    async with serving(Rules(allowed=("localhost",))) as (client, server):
        server.plan(Header("set-cookie", "id=1"), times=None)
        url = f"http://localhost:{server.address.rpartition(':')[2]}/x"
        await client.document(url, limit_bytes=100)
        await client.document(url, limit_bytes=100)
        assert "cookie" not in server.requests[1].headers


async def test_five_redirects_are_followed_and_not_six() -> None:
    async with serving() as (client, server):
        server.plan(Redirect(f"{server.url}/x"), times=5)
        assert (await client.document(f"{server.url}/x", limit_bytes=100)).body == b"hello"
        server.plan(Redirect(f"{server.url}/x"), times=None)
        with pytest.raises(Upstream):
            await client.document(f"{server.url}/x", limit_bytes=100)
        assert len(server.requests) == 12


async def test_a_redirect_may_be_relative() -> None:
    async with serving() as (client, server):
        server.plan(Answer(302, headers={"Location": "../x#part"}), path="/a/b")
        document = await client.document(f"{server.url}/a/b", limit_bytes=100)
        assert (document.body, document.url) == (b"hello", f"{server.url}/x")


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_document_that_is_too_large_is_not_read(is_announced: bool) -> None:
    async with serving() as (client, server):
        server.files["/large"] = b"x" * 5_000_000
        if not is_announced:
            server.plan(Header("content-length"))
        with pytest.raises(TooLarge):
            await client.document(f"{server.url}/large", limit_bytes=1000)


async def test_a_compressed_document_is_refused() -> None:
    async with serving() as (client, server):
        server.plan(Header("content-encoding", "gzip"))
        with pytest.raises(Hopeless) as caught:
            await client.document(f"{server.url}/x", limit_bytes=1000)
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize("fault", [Drop(), Cut(2), Answer(200, b"short", {"content-length": "50"})])
async def test_a_broken_answer_may_heal(fault: Drop | Cut | Answer) -> None:
    async with serving() as (client, server):
        # A kept connection that fails is tried once more by the library.
        server.plan(fault, times=2)
        with pytest.raises(Upstream) as caught:
            await client.document(f"{server.url}/x", limit_bytes=1000, total_seconds=5)
    assert caught.value.code in ("upstream_error", "stalled")


async def test_nothing_listening_is_told_with_what_to_check() -> None:
    async with serving() as (client, server):
        url = server.url
    client = Client(LOOPBACK)
    with pytest.raises(Upstream) as caught:
        await client.document(f"{url}/x", limit_bytes=10)
    assert "check the network" in caught.value.message
    await client.close()


async def test_a_name_that_nobody_knows_may_heal() -> None:
    client = Client(Rules(allowed=("nowhere.invalid",)))
    with pytest.raises(Upstream) as caught:
        await client.document("https://nowhere.invalid/x", limit_bytes=10)
    assert "nowhere.invalid" in caught.value.message
    await client.close()


@pytest.mark.parametrize("fault", [Stall(3), Hang()])
async def test_silence_is_noticed_after_the_given_time_and_not_much_later(fault: Stall | Hang) -> None:
    """F-005."""
    heard = 0.0

    async def listen(client: Client, url: str) -> None:
        nonlocal heard
        async with client.open(OutboundRequest(url=url)) as response:
            async for _ in response.chunks():
                heard = time.monotonic()

    async with serving() as (_, server):
        # A whole second, so that a fifth of it is more than a busy machine's hiccup.
        client = Client(LOOPBACK, stall_seconds=1.0)
        server.plan(fault)
        heard = time.monotonic()
        with pytest.raises(Upstream) as caught:
            await listen(client, f"{server.url}/x")
        assert caught.value.code == "stalled"
        assert 1.0 <= time.monotonic() - heard <= 1.2
        await client.close()


async def test_a_document_has_a_limit_in_all_however_it_trickles() -> None:
    async with serving() as (client, server):
        server.files["/slow"] = b"x" * 1000
        server.bytes_per_second = 500.0
        with pytest.raises(Upstream) as caught:
            await client.document(f"{server.url}/slow", limit_bytes=5000, total_seconds=0.3)
        assert caught.value.code == "upstream_timeout"


async def test_leaving_early_cuts_the_connection() -> None:
    async with serving() as (client, server):
        server.files["/large"] = b"x" * 50_000_000
        async with client.open(OutboundRequest(url=f"{server.url}/large")) as response:
            async for _ in response.chunks():
                break
        assert (await client.document(f"{server.url}/x", limit_bytes=10)).body == b"hello"
        assert server.connections == 2
        assert server.bytes_sent("/large") < 50_000_000


async def test_a_certificate_that_nobody_signed_is_not_trusted(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    await run(
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-days", "1", "-subj", "/CN=127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    asked: list[bytes] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.read(10))
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    client = Client(LOOPBACK)
    with pytest.raises(Upstream) as caught:
        await client.document(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/", limit_bytes=10)
    assert "certificate" in caught.value.message
    assert asked in ([], [b""])
    await client.close()
    server.close()
    await server.wait_closed()


def test_from_https_nobody_is_led_to_plain_http() -> None:
    client = Client(LOOPBACK)
    secure = client.rules.check_url("https://example.com/a")
    assert client.follow(secure, "/b").url == "https://example.com/b"
    with pytest.raises(Invalid) as caught:
        client.follow(secure, "http://example.com/b")
    assert caught.value.code == "uri_not_allowed"


async def test_a_proxy_in_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with faulty() as proxy, serving() as (client, server):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        assert (await client.document(f"{server.url}/x", limit_bytes=10)).body == b"hello"
        assert proxy.connections == 0
