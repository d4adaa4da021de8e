"""The address of a bus: anonymous or with a user in it, which nobody but the server gets to see."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from tests.bus.server import plain_server

from enginehouse.bus import credentials
from enginehouse.bus.address import BusAddress, parse_address, worker_url
from enginehouse.bus.nats import BusOptions, NatsBus
from enginehouse.core import subjects
from enginehouse.core.errors import Denied, EnginehouseError, Invalid, Unavailable
from enginehouse.core.ids import NodeId
from enginehouse.ports import Message

SECRET = "p@ss/w:rd"
WRITTEN = "p%40ss%2Fw%3Ard"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("nats://host:4222", BusAddress(servers=("nats://host:4222",))),
        ("host:4222", BusAddress(servers=("nats://host:4222",))),
        ("tls://[::1]:4222", BusAddress(servers=("tls://[::1]:4222",))),
        ("nats://u:p%40@host:1", BusAddress(servers=("nats://host:1",), user="u", password="p@")),
        ("nats://u:p@a:1, nats://u:p@b:2", BusAddress(servers=("nats://a:1", "nats://b:2"), user="u", password="p")),
        ("nats://t0ken@host:1", BusAddress(servers=("nats://host:1",), token="t0ken")),
    ],
)
def test_an_address_is_read_as_every_nats_client_reads_it(url: str, address: BusAddress) -> None:
    assert parse_address(url) == address


@pytest.mark.parametrize(
    "url",
    ["", "nats://", "nats://u:secret@", "nats://u:secret@host:x", "nats://u:secret@[::1", "http://u:secret@host:1"],
)
def test_what_is_no_address_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(Invalid, match="cannot use the address of the bus") as caught:
        parse_address(url)
    assert "secret" not in caught.value.message


async def hears_itself(bus: NatsBus) -> bool:
    heard = asyncio.Event()

    def receive(message: Message) -> None:
        heard.set()

    await bus.subscribe("nodes.n.backend.list", receive)
    await bus.publish("nodes.n.backend.list", b"{}")
    async with asyncio.timeout(5):
        await heard.wait()
    return True


@pytest.mark.parametrize(
    ("authorization", "user"),
    [
        ("", ""),
        (f'user: worker, password: "{SECRET}"', f"worker:{WRITTEN}@"),
        ('token: "t0ken"', "t0ken@"),
    ],
)
async def test_anonymous_servers_and_those_with_a_user_or_token_let_us_in(
    tmp_path: Path, authorization: str, user: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with plain_server(tmp_path, authorization) as place:
        # A credential of the frontend's own bus, which this server knows nothing of, does not get in the way.
        options = BusOptions(url=f"nats://{user}{place}", name="one", jwt="j" if user else "", seed="s" if user else "")
        bus = await NatsBus.connect(options, limit_seconds=5)
        assert await hears_itself(bus)
    async with asyncio.timeout(10):
        while bus.is_connected:  # noqa: ASYNC110 - the bus tells it to nobody
            await asyncio.sleep(0.01)
    with pytest.raises(Unavailable) as caught:
        await bus.publish("nodes.n.backend.list", b"{}")
    await bus.close()
    for text in (caplog.text, caught.value.message):
        assert place in text
        assert not any(secret in text for secret in (SECRET, WRITTEN, "t0ken"))


async def test_a_user_in_the_address_wins_over_a_credential(tmp_path: Path) -> None:
    accounts = credentials.load_or_create(tmp_path / "bus")
    made = credentials.mint_user(accounts.account_seed, "one", subjects.worker_permissions(NodeId("n")))
    jwt, other = made.jwt, made.user
    # With a key among its users a server asks every client for a signature, and takes a password all the same.
    users = f'users: [{{ user: worker, password: "right" }}, {{ nkey: "{other}" }}]'
    async with plain_server(tmp_path, users) as place:
        options = BusOptions(url=f"nats://worker:right@{place}", name="one", jwt=jwt, seed="no seed")
        bus = await NatsBus.connect(options, limit_seconds=5)
        assert await hears_itself(bus)
        await bus.close()


async def test_a_wrong_password_is_told_at_once_and_not_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with plain_server(tmp_path, 'user: worker, password: "right"') as place:
        for url in (f"nats://worker:wr0ng@{place}", f"nats://{place}"):
            with pytest.raises(Denied, match=f"at nats://{place}: it does not accept the credential") as caught:
                await NatsBus.connect(BusOptions(url=url, name="one"), limit_seconds=5)
            assert "wr0ng" not in caught.value.message
    assert "wr0ng" not in caplog.text


async def test_a_server_that_is_not_there_is_named_without_the_password() -> None:
    with pytest.raises(EnginehouseError, match=r"nats://127\.0\.0\.1:1 within") as caught:
        await NatsBus.connect(BusOptions(url="nats://worker:secret@127.0.0.1:1", name="one"), limit_seconds=0.3)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("url", "advertised", "is_embedded", "told"),
    [
        ("nats://127.0.0.1:4222", "", True, "nats://box:4222"),
        ("nats://127.0.0.1:4222", "bus.example", True, "nats://bus.example:4222"),
        ("nats://127.0.0.1:4222", "bus.example:4333", True, "nats://bus.example:4333"),
        ("nats://user:secret@bus:4222", "", False, "nats://bus:4222"),
    ],
)
def test_a_worker_gets_an_address_of_the_bus_without_the_password(
    url: str, advertised: str, is_embedded: bool, told: str
) -> None:
    assert worker_url("box", url=url, advertised=advertised, is_embedded=is_embedded) == told


def test_a_worker_that_uses_ipv6_gets_a_bracketed_address() -> None:
    assert worker_url("::1", url="nats://127.0.0.1:4222", advertised="", is_embedded=True) == "nats://[::1]:4222"
