"""Builds one worker: its parts, its link to the frontend and its bus. Also builds installations for the commands that
work without a cluster.

This is the only module that chooses the worker's adapters.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from enginehouse.artifact.blobs.store import BlobStore
from enginehouse.artifact.images.sharing import Manifests
from enginehouse.artifact.origins import Suppliers
from enginehouse.core.archive import ArchiveLimits
from enginehouse.core.errors import Invalid
from enginehouse.core.node_api import RegisterReply
from enginehouse.engine.engines import Engines
from enginehouse.fetch.galleries.sources import load_named
from enginehouse.fetch.http.addresses import Rules
from enginehouse.fetch.http.client import Client
from enginehouse.fetch.models.credentials import ModelCredentials
from enginehouse.fetch.pypi import Limits, Python
from enginehouse.fetch.registry.requests import Registries
from enginehouse.host import confinement, disk, hardware, processes, program_log
from enginehouse.host.blocking import in_thread
from enginehouse.link.client import FrontendClient
from enginehouse.link.uploads import FrontendUploads
from enginehouse.link.worker import WorkerLink
from enginehouse.loop import Loop, Signal
from enginehouse.ports import Engine
from enginehouse.settings.file import read_credentials, read_model_credentials
from enginehouse.settings.programs import InstallSettings, WorkerSettings
from enginehouse.worker.agent import Agent
from enginehouse.worker.backends.installation import Installation, InstallerOptions, lock_backends
from enginehouse.worker.backends.installer import Installer, Storage
from enginehouse.worker.backends.inventory import Inventory
from enginehouse.worker.backends.python_packages import Packages
from enginehouse.worker.backends.trees import Trees
from enginehouse.worker.commands.executor import Executor
from enginehouse.worker.commands.journal import Journal
from enginehouse.worker.commands.ports import CommandPorts
from enginehouse.worker.enclosures import Enclosures
from enginehouse.worker.engines.supervisor import Supervisor
from enginehouse.worker.http_server.server import HttpOptions, PresentedToken, WorkerHttpServer
from enginehouse.worker.http_server.storage import Roots
from enginehouse.worker.identity import IdentityFiles
from enginehouse.worker.local import Local
from enginehouse.worker.locks import Locks
from enginehouse.worker.models.fetching import FileFetcher
from enginehouse.worker.models.files import DOWNLOADS, ModelFiles
from enginehouse.worker.models.sources import ModelSources
from enginehouse.worker.options import WorkerOptions
from enginehouse.worker.parts import AgentParts
from enginehouse.worker.reach import STEP_SECONDS, ReachWatch

if TYPE_CHECKING:
    from enginehouse.bus.nats import NatsBus

BUS_CONNECT_SECONDS = 30.0  # after this the worker registers again: the address may have changed
FIRST_ENGINE_PORT = 50051


async def run(settings: WorkerSettings) -> int:
    # Now, while the frontend may be starting too, and not between joining and the bus.
    from enginehouse.bus.nats import NatsBus  # noqa: F401

    disk.make_usable(settings.data)
    options = _options(settings)
    lock = disk.Lock(settings.data / "worker.lock", "start a worker")
    # In addition to the lock of the data directory: `enginehouse local` may be given only the backends directory.
    backends_lock = lock_backends(options.backends, "start a worker")
    engine = Engines()
    clients = [FrontendClient(url, settings.token, user_agent="enginehouse-worker") for url in settings.url.split(",")]
    tokens = PresentedToken()
    parts = make_parts(options, engine, os.environ, clients, tokens)
    reach = Loop(
        "reach", ReachWatch(clients, options.node_file, lambda: tokens.current).step, STEP_SECONDS, is_housekeeping=True
    )
    agent = Agent(options, parts, WorkerLink(*clients), partial(_open_bus, settings))
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(agent.run())
            watching = group.create_task(reach.run())
            running = asyncio.get_running_loop()
            for number in processes.stop_signals():
                running.add_signal_handler(number, agent.stop)
            try:
                await task
            finally:
                watching.cancel()
    finally:
        await engine.close()
        backends_lock.release()
        lock.release()
    return 0


def make_parts(
    options: WorkerOptions,
    engine: Engine,
    environment: Mapping[str, str],
    frontends: Sequence[FrontendClient] = (),
    tokens: PresentedToken | None = None,
) -> AgentParts:
    """Build the parts of a worker that use the disk, processes and network of this machine."""
    changed = Signal()
    installation = make_installation(options.installing, environment)
    tokens = tokens or PresentedToken()
    models = make_models(options, installation, environment, FrontendUploads(frontends, lambda: tokens.current))
    locks = Locks()
    supervisor = Supervisor(
        options,
        installation.trees,
        models,
        engine,
        locks=locks,
        environment=environment,
        enclosures=installation.enclosures,
        changed=changed,
    )
    server = WorkerHttpServer(
        HttpOptions(
            roots=Roots(models=options.models, data=options.data, staging=options.staging),
            join_token=options.join_token,
            base_port=options.base_port,
            port=options.http_port,
            logs=supervisor.logs,
            program_log=program_log.log_path(options.directory, "worker"),
            token=tokens,
            files=models,
        )
    )
    journal = Journal(options.journal)
    ports = CommandPorts(
        trees=Inventory(installation.trees),
        installer=installation.installer,
        models=models,
        supervisor=supervisor,
        journal=journal,
        look_up=lambda named: load_named(named, installation.client, options.directory / "galleries"),
    )
    return AgentParts(
        machine=hardware,
        node_files=IdentityFiles(
            options.node_key, options.node_file, options.waiting_file, [one.url for one in frontends]
        ),
        generations=installation.trees,
        inventory=ports.trees,
        installer=installation.installer,
        models=models,
        supervisor=supervisor,
        journal=journal,
        executor=Executor(ports, changed, locks),
        look_up=ports.look_up,
        changed=changed,
        http_server=server,
        close=installation.close,
    )


def make_models(
    options: WorkerOptions,
    installation: Installation,
    environment: Mapping[str, str],
    uploads: FrontendUploads | None = None,
) -> ModelFiles:
    sources = ModelSources(
        client=installation.client,
        registries=installation.registries,
        patience=options.installing.patience,
        headers=ModelCredentials(options.model_credentials, environment).headers,
        uploads=uploads,
        directories=options.model_directories,
    )
    fetcher = FileFetcher(options.models / DOWNLOADS, installation.python, sources)
    return ModelFiles(options.models, fetcher, may_link=options.installing.confinement.protects_trees)


def make_installation(options: InstallerOptions, environment: Mapping[str, str]) -> Installation:
    """Build the installer of a backends directory. The caller holds the lock of the directory."""
    rules = Rules(options.allowed_hosts)
    client = Client(rules, stall_seconds=options.stall_seconds)
    registries = Registries(
        rules, environment=environment, credentials=options.registry_credentials, patience=options.patience
    )
    python = Python(
        environment,
        limits=Limits(stall_seconds=options.stall_seconds),
        before_exec=processes.die_with_parent(),
    )
    trees = Trees(options.backends, options.system)
    storage = Storage(
        trees=trees,
        blobs=BlobStore(trees.private / "blobs"),
        manifests=Manifests(trees.private / "files"),
        limits=options.limits,
        cap_bytes=options.cap_bytes,
        may_link=options.may_link,
    )
    suppliers = Suppliers(client, registries, hardware.platform())
    enclosures = Enclosures(options.data or options.backends.parent, options.confinement, options.hidden)
    return Installation(
        trees=trees,
        blobs=storage.blobs,
        installer=Installer(storage, suppliers, Packages(python, environment, enclosures)),
        suppliers=suppliers,
        python=python,
        client=client,
        registries=registries,
        enclosures=enclosures,
    )


@asynccontextmanager
async def open_local(
    options: InstallerOptions, environment: Mapping[str, str], *, doing: str, is_locked: bool = True
) -> AsyncIterator[Local]:
    """Open a backends directory without a cluster.

    With the lock, interrupted installs are finished or undone first. Without it the directory is read-only.
    """
    lock = lock_backends(options.backends, doing) if is_locked else None
    installation = make_installation(options, environment)
    try:
        if is_locked:
            try:
                await in_thread(installation.installer.recover)
            except OSError as error:
                raise disk.storage_error(error, f"use the backends directory {options.backends}") from error
        yield Local(options, installation)
    finally:
        await installation.close()
        if lock is not None:
            lock.release()


def _options(settings: WorkerSettings) -> WorkerOptions:
    return WorkerOptions(
        directory=settings.data,
        name=settings.name,
        join_token=settings.token,
        advertise_host=settings.advertise_host,
        base_port=settings.base_port or FIRST_ENGINE_PORT,
        http_port=settings.http_port,
        model_directories=settings.model_directories,
        model_credentials=read_model_credentials(settings.model_credentials),
        labels=settings.labels,
        max_replicas_per_model=settings.max_replicas_per_model,
        grace_seconds=settings.grace_seconds,
        installing=installer_options(settings, settings.data, settings.data / "backends"),
    )


def installer_options(settings: InstallSettings, data: Path, backends: Path) -> InstallerOptions:
    """The options of installs into `backends`, by a worker or by a command without a server."""
    chosen = confinement.choose(settings.engine_confinement, settings.engine_user)
    secret_files = [settings.registry_credentials]
    if isinstance(settings, WorkerSettings):
        secret_files.append(settings.model_credentials)
    return InstallerOptions(
        backends=backends,
        system=settings.backends_system_path,
        allowed_hosts=settings.allowed_hosts,
        registry_credentials=read_credentials(settings.registry_credentials),
        limits=ArchiveLimits(total_bytes=settings.archive_limit_bytes),
        cap_bytes=settings.blob_cap_bytes,
        data=data,
        hidden=tuple(path for path in secret_files if path is not None),
        confinement=chosen,
        # Any other directory may be LocalAI's, whose engines are not confined and may write into linked files.
        may_link=chosen.protects_trees and backends == data / "backends",
    )


async def _open_bus(settings: WorkerSettings, reply: RegisterReply) -> NatsBus:
    url = settings.nats_url or reply.nats_url
    if not url:
        # A Go frontend never reports the address of its bus, so a retry is pointless.
        raise Invalid(
            f"cannot find the bus: {settings.url} does not report its address; set --nats-url, ENGINEHOUSE_NATS_URL or "
            "LOCALAI_NATS_URL, for example nats://host:4222",
            code="invalid_setting",
            param="nats_url",
        )
    from enginehouse.bus.nats import BusOptions, NatsBus  # imported here because `enginehouse local` has no bus

    options = BusOptions(
        url=url,
        name=f"enginehouse-worker-{reply.name}",
        jwt=reply.nats_jwt,
        seed=reply.nats_user_seed,
    )
    return await NatsBus.connect(options, limit_seconds=BUS_CONNECT_SECONDS)
