"""Everything outside of a frontend: the store and the bus it is given, registries, galleries, sources of models.

Used by `build_frontend`. The program makes the real ones here (`make_outside`); tests and the simulation make their own
`Outside`. Nothing here has a loop or a route.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Mapping
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from enginehouse.build_localai import LocalaiOutside, localai_outside, outside_sources
from enginehouse.bus import credentials, revocation
from enginehouse.bus.address import parse_address, worker_url
from enginehouse.bus.credentials import BusAccounts
from enginehouse.bus.violations import ViolationLog
from enginehouse.core import subjects
from enginehouse.core.address import Endpoint, plain_host
from enginehouse.core.artifact import Artifact
from enginehouse.core.errors import Invalid
from enginehouse.core.ids import NodeId
from enginehouse.core.pace import USUAL, ServingPace
from enginehouse.fetch.galleries.documents import read_mappings
from enginehouse.fetch.galleries.model_index import with_models
from enginehouse.fetch.galleries.sources import Sources, load_builtin
from enginehouse.fetch.http.addresses import ParsedRules, Rules
from enginehouse.fetch.http.client import Client
from enginehouse.fetch.http.retries import RetryPolicy
from enginehouse.fetch.models.credentials import ModelCredentials
from enginehouse.fetch.models.sources import ModelFinder, SourceOptions
from enginehouse.fetch.origins import open_origin
from enginehouse.fetch.registry.requests import Registries
from enginehouse.frontend.fleet.bus_credentials import BusIssuer, Minted
from enginehouse.frontend.fleet.nodes import ANYWHERE, AddressRules, Verify
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.localai.pushing import FileServers
from enginehouse.frontend.operations.targets import Freshen
from enginehouse.frontend.operations.versions import LIMIT_SECONDS, AskRegistry
from enginehouse.frontend.serving.drafts import CheckEndpoint
from enginehouse.frontend.serving.schedules import Schedules
from enginehouse.host import listen, signing
from enginehouse.host.clock import SystemClock
from enginehouse.host.inherited import inherited_owner
from enginehouse.ports import Bus, Clock, Engine
from enginehouse.settings.file import read_credentials, read_model_credentials
from enginehouse.settings.programs import FrontendSettings
from enginehouse.store.db import Store

POSTGRES_PORT = 5432
RESOLVE_SECONDS = 2.0  # for the name that a worker advertises; a name that does not resolve in time has no addresses
REVOKE_SECONDS = 2.0  # for the server on this machine; the loop retries a failure


class ModelOutside(Struct, frozen=True, kw_only=True):
    """Where models come from. Without sources only models of the built-in gallery can be added."""

    sources: ModelFinder | None = None
    galleries: Sources | None = None
    check_endpoint: CheckEndpoint | None = None
    uploads: Path = Path("uploads")

    def key_of(self, credential: str) -> str:
        """The value of a credential, for a server elsewhere; "" without one."""
        return self.sources.credentials.value(credential) if credential and self.sources is not None else ""


class Outside(Struct, frozen=True, kw_only=True):
    """Everything outside of a frontend. Tests and the simulation pass their own."""

    store: Store
    bus: Bus
    clock: Clock
    ask_registry: AskRegistry  # resolves a tag to a version
    galleries: Galleries
    owner: str  # of this frontend's leases
    verify: Verify = signing.verify
    addresses: AddressRules = ANYWHERE
    bus_issuer: BusIssuer = BusIssuer()
    violation_log: ViolationLog | None = None  # of the embedded bus server
    models: ModelOutside = ModelOutside()
    localai: LocalaiOutside | None = None  # None: no models on LocalAI's workers
    pace: ServingPace = USUAL
    freshen: Freshen | None = None  # None asks LocalAI's workers before targets are chosen


def model_outside(settings: FrontendSettings, client: Client, rules: Rules, addresses: AddressRules) -> ModelOutside:
    """Create the real sources of models. They share the client with the galleries, which close it."""
    credentials = ModelCredentials(read_model_credentials(settings.model_credentials), os.environ)
    directory = settings.data / "model-galleries"
    return ModelOutside(
        sources=ModelFinder(
            client, registries_of(rules, settings), credentials, SourceOptions(huggingface=settings.hf_endpoint)
        ),
        galleries=Sources(settings.model_galleries, client, directory, parse=with_models),
        check_endpoint=partial(_checked_endpoint, rules=ParsedRules(rules), addresses=addresses),
        uploads=settings.data / "uploads",
    )


async def _checked_endpoint(url: str, *, rules: ParsedRules, addresses: AddressRules) -> str:
    """Return host:port of a server elsewhere, with the address that its name has now: it is not resolved again."""
    target = rules.check_url(url)
    if target.scheme != "http":
        raise Invalid(
            f"cannot use {url}: servers elsewhere are reached by plain http; put a proxy beside it, or use a tunnel",
            code="unsupported",
            param="source",
        )
    found = (
        [str(target.address)]
        if target.address is not None
        else sorted(await listen.resolve_within(target.host, limit_seconds=RESOLVE_SECONDS))
    )
    if not found:
        raise Invalid(f"cannot resolve {target.host}: check the name", code="invalid_uri", param="source")
    for one in found:
        rules.check_address(target.host, target.port, ip_address(one))
        if Endpoint(plain_host(one), target.port) in addresses.taken:
            raise Invalid(
                f"cannot use {url}: this address belongs to the cluster itself", code="uri_not_allowed", param="source"
            )
    return f"[{found[0]}]:{target.port}" if ":" in found[0] else f"{found[0]}:{target.port}"


def registries_of(rules: Rules, settings: FrontendSettings) -> Registries:
    return Registries(
        rules,
        environment=os.environ,
        credentials=read_credentials(settings.registry_credentials),
        patience=RetryPolicy(tries=2, total_seconds=LIMIT_SECONDS),
    )


def make_outside(
    settings: FrontendSettings,
    store: Store,
    bus: Bus,
    accounts: BusAccounts | None = None,
    addresses: AddressRules = ANYWHERE,
) -> Outside:
    """Create the outside of the program: real registries and galleries."""
    client = Client(rules := Rules(settings.allowed_hosts))
    return Outside(
        store=store,
        bus=bus,
        clock=SystemClock(),
        ask_registry=_registry_question(client, rules, settings),
        galleries=Galleries([load_builtin()], Sources(settings.backend_galleries, client, settings.data / "galleries")),
        owner=inherited_owner() or str(uuid.uuid4()),
        addresses=addresses,
        bus_issuer=_bus_issuer(settings, accounts),
        violation_log=ViolationLog(settings.data / "logs" / "nats.log"),
        models=model_outside(settings, client, rules, addresses),
    )


def with_localai(settings: FrontendSettings, outside: Outside, engine: Engine, servers: FileServers) -> Outside:
    """Add what reaches LocalAI's workers to the outside of the program."""
    assert outside.models.sources is not None, "the program has sources of models"
    registries = registries_of(Rules(settings.allowed_hosts), settings)
    made = localai_outside(settings, engine, servers, outside_sources(outside.models.sources, registries))
    return msgspec.structs.replace(outside, localai=made)


def _registry_question(client: Client, rules: Rules, settings: FrontendSettings) -> AskRegistry:
    """Return a function that resolves a tag by a query to its registry."""
    registries = registries_of(rules, settings)

    async def ask(uri: str, platform: str, sha256: str) -> Artifact:
        return await open_origin(uri, client=client, registries=registries, sha256=sha256).resolve(platform)

    return ask


def _bus_issuer(settings: FrontendSettings, accounts: BusAccounts | None) -> BusIssuer:
    """Create the issuer of bus credentials. `accounts` are those of the embedded server; None for another bus."""
    life = settings.bus_credential_seconds
    is_embedded = accounts is not None
    url_for = partial(worker_url, url=settings.nats_url, advertised=settings.advertise_nats, is_embedded=is_embedded)
    if accounts is None:
        return BusIssuer(life_seconds=life, url_for=url_for)
    embedded_accounts, seed = accounts, accounts.account_seed

    async def mint(node_id: NodeId) -> Minted:
        allowed, name = subjects.worker_permissions(node_id), credentials.worker_name(node_id)
        # In a thread: every step of it gives up the interpreter, and with many threads waiting each costs milliseconds.
        made = await asyncio.to_thread(credentials.mint_user, seed, name, allowed, life_seconds=life)
        return Minted(made.jwt, made.seed, made.user, made.expires_at or 0.0)

    async def revoke(revoked: Mapping[str, int]) -> None:
        await revocation.revoke(settings.nats_url, embedded_accounts, revoked, limit_seconds=REVOKE_SECONDS)

    return BusIssuer(mint=mint, life_seconds=life, url_for=url_for, revoke=revoke)


def address_rules(settings: FrontendSettings, port: int) -> AddressRules:
    """Return the rules for addresses that nodes advertise. Blocks: resolves names."""
    taken = [(settings.host, port), *parse_address(settings.nats_url).endpoints]
    if settings.database_url.startswith("postgres"):
        parts = urlsplit(settings.database_url)
        taken.append((parts.hostname or "127.0.0.1", parts.port or POSTGRES_PORT))
    resolve = partial(listen.resolve_within, limit_seconds=RESOLVE_SECONDS)
    endpoints = {Endpoint(plain_host(one), number) for host, number in taken for one in listen.addresses_of(host)}
    return AddressRules(settings.node_networks, frozenset(endpoints), resolve)


async def store_schedules(schedules: Schedules, path: Path | None) -> None:
    """Store the schedules of a file. Raises `Invalid` if it cannot be read, so that a frontend does not start."""
    if path is None:
        return
    try:
        content = await asyncio.to_thread(path.read_bytes)
    except OSError as error:
        why = f"cannot read the schedules in {path}: {error.strerror}"
        raise Invalid(why, code="invalid_setting", param="schedules") from None
    await schedules.put_all(await asyncio.to_thread(read_mappings, content, str(path)), str(path))
