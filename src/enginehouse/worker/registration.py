"""Registers the worker with a frontend and waits for approval.

A worker that was accepted before proves itself by its key, and needs no token; it never gives up: a server may have
been restored from a backup, or its operator may be about to approve it again. To one that never was, a refusal (a wrong
token, a refused name) is final and raises the frontend's error. Everything else is retried, with one log line per
reason. Every attempt builds a new request, so that its figures are current.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterator

import msgspec
from msgspec import Struct

from enginehouse.core.challenge import CODE as CHALLENGE_REFUSED
from enginehouse.core.errors import Conflict, Denied, EnginehouseError, NotFound, Unauthenticated, Unavailable
from enginehouse.core.node_api import RegisterReply, RegisterRequest
from enginehouse.host.blocking import in_thread
from enginehouse.ports import Link
from enginehouse.worker.options import WorkerOptions
from enginehouse.worker.parts import Machine, NodeFiles, Signer

log = logging.getLogger(__name__)

# Between registrations while the node waits for approval. Nobody tells the worker of that, and hundreds may wait for
# days. The longest pause with its jitter is below 15 s.
PENDING_FIRST_SECONDS = 2.0
PENDING_GROWTH = 1.3
PENDING_CAP_SECONDS = 12.0
JITTER = 0.2  # of a pause: machines that started together do not ask together for ever
REFUSED_FIRST_SECONDS = 2.0
REFUSED_CAP_SECONDS = 60.0  # a server that was restored gets its workers back within about a minute
RETRY_FIRST_SECONDS = 0.5
RETRY_CAP_SECONDS = 10.0  # a frontend that comes back is found within this time


class Joined(Struct, frozen=True):
    node: RegisterReply
    host: str  # the address at which the frontend reaches this machine


class Desk(Struct, frozen=True, kw_only=True):
    """What a registration is made from."""

    machine: Machine
    link: Link
    identity: Signer
    node_files: NodeFiles
    # Serves HTTP at a host of this machine, and returns the port; 0 if it cannot.
    serve: Callable[[str], Awaitable[int]]


async def join(options: WorkerOptions, desk: Desk, stop: asyncio.Event) -> Joined | None:
    """Register until the node is accepted; None if `stop` is set first."""
    link = desk.link
    pause, host = RETRY_FIRST_SECONDS, options.advertise_host or link.local_address()
    pending, refused = pending_pauses(), refused_pauses()
    told = _Told(desk.node_files)
    was_accepted = await in_thread(desk.node_files.was_accepted)
    by_key = was_accepted or not options.join_token
    while not stop.is_set():
        try:
            # First, because the connection also reveals the local address, which is part of the signed claims.
            challenge = await link.challenge(by_key=by_key)
            if by_key and not challenge and options.join_token:
                by_key = False  # LocalAI's frontends know tokens only
                continue
            host = host or link.local_address()
            addresses = NodeAddresses(host, await desk.serve(host) if host else 0)
            request = await in_thread(registration, options, desk, addresses, challenge)
            node = await link.register(request, by_key=by_key)
            approve = f"`enginehouse nodes approve {node.name}`"
            reason = f"node {node.name} ({node.id}) waits for approval; approve it with {approve}"
            if host and node.status != "pending":
                return Joined(node, host)
            wait = next(pending) if host else 0.0
        except Unavailable as error:
            reason = error.message
            wait, pause = pause, min(RETRY_CAP_SECONDS, 2 * pause)
        except (Unauthenticated, Denied, NotFound) as error:
            if by_key and options.join_token:
                by_key = False  # the token may be good for what the key is not
                continue
            # The missing address, which only the first connection reveals, may be the reason for the refusal.
            if not was_accepted and (host or not link.local_address()):
                raise
            wait = next(refused) if was_accepted else 0.0
            reason, by_key = error.message, was_accepted or not options.join_token
            if was_accepted:
                await in_thread(told.refused, reason, wait)
        except Conflict as error:
            if error.code != CHALLENGE_REFUSED:
                raise
            reason, wait = error.message, RETRY_FIRST_SECONDS
        except EnginehouseError as error:
            if host or not link.local_address():
                raise
            reason, wait = error.message, 0.0
        # Without --advertise-host, the local address may change: a laptop moves to another network.
        known = options.advertise_host or link.local_address() or ("127.0.0.1" if not wait else "")
        if known != host:
            host, wait = known, 0.0
        else:
            await in_thread(told.waits, reason)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await stop.wait()
    return None


class _Told:
    """What this worker has said about why it is not joined: in its log, and in a file for programs on this machine."""

    def __init__(self, files: NodeFiles) -> None:
        self._files = files
        self._reason = ""

    def refused(self, reason: str, wait_seconds: float) -> None:
        """Said at every attempt: nothing else tells that this machine takes no work."""
        log.error("worker.refused reason=%s again_in_seconds=%.0f", reason, wait_seconds)
        self._note(reason)

    def waits(self, reason: str) -> None:
        if reason != self._reason:
            log.warning("worker.waiting reason=%s", reason)
            self._note(reason)

    def _note(self, reason: str) -> None:
        if reason == self._reason:
            return
        self._reason = reason
        with contextlib.suppress(OSError):  # a full disk is told of by what needs it
            self._files.write_waiting(reason)


def refused_pauses() -> Iterator[float]:
    """The pauses between registrations of a node that was accepted once and is refused now."""
    seconds = REFUSED_FIRST_SECONDS
    while True:
        yield seconds * random.uniform(1 - JITTER, 1 + JITTER)
        seconds = min(REFUSED_CAP_SECONDS, 2 * seconds)


def pending_pauses() -> Iterator[float]:
    """The pauses between registrations of a node that waits for approval."""
    seconds = PENDING_FIRST_SECONDS
    while True:
        yield seconds * random.uniform(1 - JITTER, 1 + JITTER)
        seconds = min(PENDING_CAP_SECONDS, PENDING_GROWTH * seconds)


class NodeAddresses(Struct, frozen=True):
    host: str
    http_port: int = 0  # 0: this worker serves no HTTP

    def at(self, port: int) -> str:
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"{shown}:{port}" if self.host and port else ""


def registration(options: WorkerOptions, desk: Desk, addresses: NodeAddresses, challenge: str) -> RegisterRequest:
    """Build a signed request from the current state of this machine. Blocks.

    `http_address` is empty where it serves no HTTP: LocalAI's frontends would send model files to whoever listens.
    """
    capacity = desk.machine.capacity(options.models)
    request = RegisterRequest(
        name=options.name,
        node_type="backend",
        address=addresses.at(options.base_port),
        http_address=addresses.at(addresses.http_port),
        token=options.join_token,
        capability=desk.machine.capability(),
        labels={"node.replica-slots": str(options.max_replicas_per_model), **options.labels},
        max_replicas_per_model=options.max_replicas_per_model,
        platform=desk.machine.platform(),
        challenge=challenge,
        **msgspec.structs.asdict(capacity),
    )
    return desk.identity.signed(request)
