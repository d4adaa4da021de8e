"""Builds one worker: the agent, its link to the frontend, its bus and its way to ask engines whether they are ready."""

from __future__ import annotations

import asyncio
import os
from functools import partial

from enginehouse.bus.nats import BusOptions, NatsBus
from enginehouse.core.errors import Invalid
from enginehouse.core.node_api import RegisterReply
from enginehouse.engine.openai.client import HttpEngine
from enginehouse.host import confinement, disk, processes
from enginehouse.link.client import FrontendClient
from enginehouse.link.worker import WorkerLink
from enginehouse.settings.file import read_credentials
from enginehouse.settings.programs import WorkerSettings
from enginehouse.worker.agent import Agent
from enginehouse.worker.backends import assembly
from enginehouse.worker.options import WorkerOptions

BUS_CONNECT_SECONDS = 30.0  # then the worker registers again: the address may have changed
FIRST_ENGINE_PORT = 50051


async def run(settings: WorkerSettings) -> int:
    disk.make_usable(settings.data)
    chosen = confinement.choose(settings.engine_confinement, settings.engine_user)
    place = WorkerOptions(
        directory=settings.data,
        name=settings.name,
        join_token=settings.token,
        advertise_host=settings.advertise_host,
        base_port=settings.base_port or FIRST_ENGINE_PORT,
        labels=settings.labels,
        max_replicas_per_model=settings.max_replicas_per_model,
        grace_seconds=settings.grace_seconds,
        allowed_hosts=settings.allowed_hosts,
        registry_credentials=read_credentials(settings.registry_credentials),
        system_backends=settings.backends_system_path,
        archive_limit_bytes=settings.archive_limit_bytes,
        blob_cap_bytes=settings.blob_cap_bytes,
        confinement=chosen,
        hidden=(settings.registry_credentials,) if settings.registry_credentials is not None else (),
    )
    lock = disk.Lock(settings.data / "worker.lock", "start a worker")
    # Beside that of the data directory: `enginehouse local` may be given the backends alone.
    backends_lock = assembly.lock(place.backends, "start a worker")
    engine = HttpEngine()
    clients = [FrontendClient(url, settings.token, user_agent="enginehouse-worker") for url in settings.url.split(",")]
    link = WorkerLink(*clients)
    agent = Agent(place, link, partial(_open_bus, settings), engine, os.environ)
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(agent.run())
            running = asyncio.get_running_loop()
            for number in processes.stop_signals():
                running.add_signal_handler(number, agent.stop)
            await task
    finally:
        await engine.close()
        backends_lock.release()
        lock.release()
    return 0


async def _open_bus(settings: WorkerSettings, reply: RegisterReply) -> NatsBus:
    url = settings.nats_url or reply.nats_url
    if not url:
        # A Go frontend never says where its bus is, and asking again would not change that.
        raise Invalid(
            f"cannot find the bus: {settings.url} does not say where it is; set --nats-url, ENGINEHOUSE_NATS_URL or "
            "LOCALAI_NATS_URL, like nats://host:4222",
            code="invalid_setting",
            param="nats_url",
        )
    options = BusOptions(
        url=url,
        name=f"enginehouse-worker-{reply.name}",
        jwt=reply.nats_jwt,
        seed=reply.nats_user_seed,
    )
    return await NatsBus.connect(options, limit_seconds=BUS_CONNECT_SECONDS)
