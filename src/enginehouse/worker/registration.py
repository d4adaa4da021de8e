"""Asks a frontend to be let in, until it is answered: registration, approval, the node's own address.

What cannot heal (a wrong token, a refused name) ends with the frontend's error; everything else is asked again, with
one log line per reason. Every request is made anew, so that the figures in it are those of the moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from msgspec import Struct

from enginehouse.core.challenge import CODE as CHALLENGE_REFUSED
from enginehouse.core.errors import Conflict, EnginehouseError, Unavailable
from enginehouse.core.node_api import RegisterReply, RegisterRequest
from enginehouse.host.blocking import in_thread
from enginehouse.ports import Link
from enginehouse.worker.options import WorkerOptions
from enginehouse.worker.parts import Machine, Signer

log = logging.getLogger(__name__)

PENDING_SECONDS = 2.0  # how often a worker that waits for approval asks again
RETRY_FIRST_SECONDS = 0.5
RETRY_CAP_SECONDS = 10.0  # a frontend that comes back is found within this


class Joined(Struct, frozen=True):
    node: RegisterReply
    host: str  # under which the frontend reaches this machine


async def join(
    options: WorkerOptions, machine: Machine, link: Link, identity: Signer, stop: asyncio.Event
) -> Joined | None:
    """The answer that lets us in; None when told to stop meanwhile."""
    pause, told, host = RETRY_FIRST_SECONDS, "", options.advertise_host or link.local_address()
    while not stop.is_set():
        try:
            # Before all else: it also tells our address, which is part of what is signed.
            challenge = await link.challenge()
            host = host or link.local_address()
            node = await link.register(await in_thread(registration, options, machine, identity, host, challenge))
            said = f"node {node.name} ({node.id}) waits for approval: `enginehouse nodes approve {node.name}`"
            if host and node.status != "pending":
                return Joined(node, host)
            wait = PENDING_SECONDS if host else 0.0
        except Unavailable as error:
            said = error.message
            wait, pause = pause, min(RETRY_CAP_SECONDS, 2 * pause)
        except Conflict as error:
            if error.code != CHALLENGE_REFUSED:
                raise
            said, wait = error.message, RETRY_FIRST_SECONDS
        except EnginehouseError as error:
            # Without our address, which only a first connection tells, it may have been refused for that.
            if host or not link.local_address():
                raise
            said, wait = error.message, 0.0
        # The near end of the connection may change, where nobody said what to advertise: a laptop moves.
        known = options.advertise_host or link.local_address() or ("127.0.0.1" if not wait else "")
        if known != host:
            host, wait = known, 0.0
        elif said != told:
            log.warning("worker.waiting %s", said)
            told = said
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await stop.wait()
    return None


def registration(
    options: WorkerOptions, machine: Machine, identity: Signer, host: str, challenge: str
) -> RegisterRequest:
    """What this machine is, as of now. Blocks. No `http_address`: this worker serves no files over HTTP, and LocalAI's
    frontends would send a model's files to whatever listens there.
    """
    capacity = machine.capacity(options.models)
    shown = f"[{host}]" if ":" in host else host
    request = RegisterRequest(
        name=options.name,
        node_type="backend",
        address=f"{shown}:{options.base_port}" if host else "",
        token=options.join_token,
        total_vram=capacity.total_vram,
        available_vram=capacity.available_vram,
        total_ram=capacity.total_ram,
        available_ram=capacity.available_ram,
        total_disk=capacity.total_disk,
        available_disk=capacity.available_disk,
        gpu_vendor=capacity.gpu_vendor,
        gpu_compute_capability=capacity.gpu_compute_capability,
        capability=machine.capability(),
        labels={"node.replica-slots": str(options.max_replicas_per_model), **options.labels},
        max_replicas_per_model=options.max_replicas_per_model,
        platform=machine.platform(),
        cores=capacity.cores,
        challenge=challenge,
    )
    return identity.signed(request)
