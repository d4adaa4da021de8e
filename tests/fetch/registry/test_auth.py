"""Tokens, passwords, and where neither of them may go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.fetch.faults import Answer, Redirect
from tests.fetch.faulty import Tokens, faulty
from tests.fetch.images import Image
from tests.fetch.pulling import FAST, LOOPBACK, Pull, read_all
from tests.fetch.real_registry import PASSWORD, USER, Registry, basic, running_registry

from enginehouse.core.errors import Denied, Invalid, Upstream
from enginehouse.core.reference import parse_image
from enginehouse.fetch.http.answers import Document
from enginehouse.fetch.http.client import Client, OutboundRequest
from enginehouse.fetch.origins import open_origin
from enginehouse.fetch.registry.auth import Challenge, RegistryAuthorization, may_know, parse_challenge
from enginehouse.fetch.registry.credentials import Credentials
from enginehouse.fetch.registry.requests import Registries

LINUX = "linux/amd64"


async def test_an_anonymous_token_is_got_once_and_used_for_everything(pull: Pull) -> None:
    tokens = pull.proxy.ask_for_tokens()
    origin = pull.origin()
    artifact = await origin.resolve(LINUX)
    await read_all(origin, artifact.layers[0])
    await pull.origin().resolve(LINUX)
    assert tokens.given == 1
    asked = pull.proxy.asked("/token")[0]
    assert "scope=repository%3Abackends%2Fone%3Apull" in asked.path
    assert "service=tests" in asked.path
    assert "authorization" not in asked.headers


async def test_credentials_are_traded_for_a_token_and_never_sent_with_requests(pull: Pull) -> None:
    pull.proxy.ask_for_tokens(Tokens(user=USER, password=PASSWORD))
    with pytest.raises(Denied) as caught:
        await pull.origin().resolve(LINUX)
    assert caught.value.code == "forbidden"
    assert "docker login" in caught.value.message
    pull.know({pull.proxy.address: f"{USER}:{PASSWORD}"})
    assert (await pull.origin().resolve(LINUX)).digest == pull.image.digest
    for request in pull.proxy.asked("/v2/"):
        assert not request.headers.get("authorization", "").startswith("Basic")


async def test_an_identity_token_is_traded_in_a_form_and_never_in_a_url(pull: Pull, tmp_path: Path) -> None:
    pull.proxy.ask_for_tokens(Tokens(identity_token="long"))
    (tmp_path / "config.json").write_text(json.dumps({"auths": {pull.proxy.address: {"identitytoken": "long"}}}))
    pull.registries = Registries(LOOPBACK, environment={"DOCKER_CONFIG": str(tmp_path)}, patience=FAST)
    assert (await pull.origin().resolve(LINUX)).digest == pull.image.digest
    (asked,) = pull.proxy.asked("/token")
    assert (asked.method, asked.path) == ("POST", "/token")
    assert b"grant_type=refresh_token" in asked.body


async def test_a_token_that_ends_in_the_middle_is_renewed(pull: Pull) -> None:
    tokens = pull.proxy.ask_for_tokens()
    origin = pull.origin()
    artifact = await origin.resolve(LINUX)
    tokens.valid.clear()
    content = await read_all(origin, artifact.layers[1], 0, 1000)
    tokens.valid.clear()
    content += await read_all(origin, artifact.layers[1], 1000)
    assert len(content) == artifact.layers[1].size_bytes
    assert tokens.given == 3


async def test_a_token_near_its_end_is_not_used_any_more(pull: Pull) -> None:
    tokens = pull.proxy.ask_for_tokens(Tokens(lifetime_seconds=1))
    door_opened = pull.origin()
    await door_opened.resolve(LINUX)
    given = tokens.given
    tokens.lifetime_seconds = None
    # Half of its second has to pass: waited for by asking, each time with a fresh origin.
    for _ in range(2000):
        await pull.origin().resolve(LINUX)
        if tokens.given > given:
            break
    assert tokens.given == given + 1


async def test_a_token_that_is_never_right_is_not_asked_for_for_ever(pull: Pull) -> None:
    tokens = pull.proxy.ask_for_tokens()
    pull.proxy.on_request = lambda request: tokens.valid.clear()
    with pytest.raises(Denied):
        await pull.origin().resolve(LINUX)
    assert tokens.given == 1
    pull.proxy.on_request = None
    origin = pull.origin()
    artifact = await origin.resolve(LINUX)
    pull.proxy.on_request = lambda request: tokens.valid.clear()
    with pytest.raises(Denied):
        await read_all(origin, artifact.layers[0])


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_token_server_is_asked_again(pull: Pull, status: int) -> None:
    pull.proxy.ask_for_tokens()
    pull.proxy.plan(Answer(status), path="/token", times=3)
    assert (await pull.origin().resolve(LINUX)).digest == pull.image.digest


@pytest.mark.parametrize("body", [b"", b"{}", b'{"token":""}', b'{"token":"a\\r\\nX: y"}', b"<html>", b'{"token":7}'])
async def test_a_token_that_is_none_is_not_used(pull: Pull, body: bytes) -> None:
    pull.proxy.ask_for_tokens()
    pull.proxy.plan(Answer(200, body), path="/token", times=None)
    with pytest.raises(Upstream):
        await pull.origin().resolve(LINUX)


async def test_a_foreign_token_server_sees_no_password(pull: Pull) -> None:
    """F-102."""
    async with faulty() as canary:
        tokens = pull.proxy.ask_for_tokens(Tokens(realm=f"{canary.url}/token"))
        canary.tokens = tokens
        pull.know({pull.proxy.address: f"{USER}:{PASSWORD}", canary.address: "other:password"})
        assert (await pull.origin().resolve(LINUX)).digest == pull.image.digest
        assert canary.asked("/token")
        assert all("authorization" not in request.headers for request in canary.requests)


@pytest.mark.parametrize(
    "realm", ["http://169.254.169.254/token", "ftp://127.0.0.1/token", "", "/token", "http://user@127.0.0.1/"]
)
async def test_a_token_server_where_we_may_not_go_is_not_asked(pull: Pull, realm: str) -> None:
    pull.proxy.ask_for_tokens()
    challenge = {"WWW-Authenticate": f'Bearer realm="{realm}",service="x"'}
    pull.proxy.plan(Answer(401, headers=challenge), path="manifests", times=None)
    with pytest.raises(Invalid) as caught:
        await pull.origin().resolve(LINUX)
    assert caught.value.code in ("uri_not_allowed", "invalid_uri")


async def test_a_secure_registry_does_not_send_us_to_a_plain_token_server() -> None:
    async def ask(request: OutboundRequest, limit_bytes: int) -> Document:
        raise AssertionError(f"asked {request.url}")

    authorization = RegistryAuthorization(
        "https://registry.example.com", Credentials({}, {"registry.example.com": "me:secret"})
    )
    image = parse_image("registry.example.com/a/b")
    with pytest.raises(Invalid) as caught:
        await authorization.unlock(image, 'Bearer realm="http://registry.example.com/token"', "", ask)
    assert caught.value.code == "uri_not_allowed"


async def test_another_host_that_blobs_are_sent_to_sees_neither_token_nor_password(pull: Pull) -> None:
    """F-102."""
    async with faulty() as canary:
        pull.proxy.ask_for_tokens(Tokens(user=USER, password=PASSWORD))
        pull.know({pull.proxy.address: f"{USER}:{PASSWORD}", canary.address: "other:password"})
        origin = pull.origin()
        layer = (await origin.resolve(LINUX)).layers[0]
        content = (pull.image.directory / "blobs" / layer.digest.replace(":", "/")).read_bytes()
        canary.files["/blob"] = content
        pull.proxy.plan(Redirect(f"{canary.url}/blob"), path=layer.digest, times=None)
        assert await read_all(origin, layer) == content
        # It asks for a password itself, which is not for it to ask.
        challenge = {"WWW-Authenticate": f'Bearer realm="{canary.url}/token"'}
        canary.plan(Answer(401, headers=challenge), times=None)
        with pytest.raises(Denied):
            await read_all(origin, layer)
        assert canary.requests
        assert all("authorization" not in request.headers for request in canary.requests)
        assert not canary.asked("/token")


async def test_basic_auth_of_a_real_registry(image: Image, tmp_path_factory: pytest.TempPathFactory) -> None:
    client = Client(LOOPBACK)
    async with running_registry(tmp_path_factory.mktemp("auth"), auth=True) as registry:
        await registry.push(image.directory, "private/one:1")
        uri = registry.reference("private/one:1")
        for known in ({}, {registry.address: f"{USER}:wrong"}, {"127.0.0.1": f"{USER}:{PASSWORD}"}):
            registries = Registries(LOOPBACK, credentials=known, patience=FAST)
            with pytest.raises(Denied):
                await open_origin(uri, client=client, registries=registries).resolve(LINUX)
        registries = Registries(LOOPBACK, credentials={registry.address: f"{USER}:{PASSWORD}"})
        origin = open_origin(uri, client=client, registries=registries)
        artifact = await origin.resolve(LINUX)
        assert artifact.digest == image.digest
        assert len(await read_all(origin, artifact.layers[1])) == image.layers[1].size_bytes
    await client.close()


async def test_a_password_goes_only_to_the_registry_that_asked(registry: Registry, pull: Pull) -> None:
    pull.proxy.plan(Answer(401, headers={"WWW-Authenticate": 'Basic realm="x"'}), path="/v2/")
    pull.know({pull.proxy.address: f"{USER}:{PASSWORD}"})
    await pull.origin().resolve(LINUX)
    assert "authorization" not in pull.proxy.requests[0].headers
    assert pull.proxy.requests[1].headers["authorization"] == basic(USER, PASSWORD)
    await pull.elsewhere(registry.reference("backends/one:latest")).resolve(LINUX)


@pytest.mark.parametrize(
    ("registry_url", "realm", "may"),
    [
        ("https://registry-1.docker.io", "https://auth.docker.io/token", True),
        ("https://quay.io", "https://quay.io/v2/auth", True),
        ("https://ghcr.io", "https://ghcr.io/token", True),
        ("https://registry.gitlab.com", "https://gitlab.com/jwt/auth", True),
        ("https://r.example.com", "https://r.example.com:8443/token", True),
        ("https://r.example.com", "http://r.example.com/token", False),
        ("https://ghcr.io", "https://evil.io/token", False),
        ("https://docker.io.evil.com", "https://auth.docker.io/token", False),
        ("https://a.co.uk", "https://b.co.uk/token", False),
        ("https://r.a.co.uk", "https://auth.a.co.uk/token", True),
        ("https://10.0.0.1", "https://10.1.0.1/token", False),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000/token", True),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5001/token", False),
        ("http://registry.lan", "http://auth.lan/token", False),
    ],
)
def test_a_password_is_for_its_host_and_the_neighbours_under_its_domain(
    registry_url: str, realm: str, may: bool
) -> None:
    assert may_know(registry_url, realm) is may


@pytest.mark.parametrize(
    ("text", "challenge"),
    [
        ('Bearer realm="https://a/t",service="s",scope="x"', Challenge("bearer", "https://a/t", "s")),
        ('bearer service=s , realm="https://a/t?x=1,2"', Challenge("bearer", "https://a/t?x=1,2", "s")),
        ('Basic realm="Registry"', Challenge("basic", "Registry", "")),
        ("Basic", Challenge("basic")),
        ("Negotiate abc", None),
        ("", None),
    ],
)
def test_a_challenge_is_read(text: str, challenge: Challenge | None) -> None:
    assert parse_challenge(text) == challenge
