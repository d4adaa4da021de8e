"""One run from one seed: a safety phase with misfortunes, a liveness phase without, and the judgement at the end.

Deterministic: chance, time and identifiers come from the seed alone. Whatever product code catches, a violated
guarantee ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import traceback
import uuid
from collections.abc import Callable, Coroutine, Iterator
from random import Random
from typing import TypeVar

from msgspec import Struct
from tests.sim.clients import Clients
from tests.sim.clocks import no_wall_clock
from tests.sim.ending import is_all_shown, is_settled, judge_the_end, shown_open, stale_routes
from tests.sim.isolation import Isolation
from tests.sim.loop import SimLoop, StepLimit
from tests.sim.options import Options
from tests.sim.store import Database, database
from tests.sim.trace import Violation
from tests.sim.world import World

from enginehouse.core.errors import EnginehouseError

W = TypeVar("W", bound=World)
STEP_LIMIT = 400_000
SETTLE_SECONDS = 150.0  # a few backoffs, a lease and a silence after the last misfortune
LOOK_SECONDS = 0.5
SHOWN_LOOK_SECONDS = 0.2
ROUTE_SECONDS = 8.0  # three heartbeats
WAITS_ON = 5  # one run in so many
AFTERMATH_SECONDS = 2.2  # what is promised to be shown within two seconds must be shown by then


class Result(Struct, frozen=True):
    seed: int
    digest: str
    steps: int
    virtual_seconds: float
    operations: int
    take_overs: int
    violation: str = ""  # empty when every guarantee held
    guarantee: str = ""
    lines: tuple[str, ...] = ()


def run(options: Options) -> Result:
    return run_world(options, World, _phases)


def run_world(
    options: Options,
    make: Callable[[Options, SimLoop, Database], W],
    phases: Callable[[W], Coroutine[None, None, None]],
    step_limit: int = STEP_LIMIT,
) -> Result:
    """Everything that `phases` does with the world that was made, from its first step to its last."""
    source = database()
    loop = SimLoop(Random(f"{options.seed}/schedule"), shuffle=options.shuffle, step_limit=step_limit)
    source.begin_run(loop)
    world = make(options, loop, source)
    violation: Exception | None = None
    trace_back = ""
    with (
        no_wall_clock(loop),
        _seeded(world.chance("ids")),
        _heard(loop),
        _quiet(),
    ):
        loop.set_exception_handler(lambda _, context: _unhandled(loop, context))
        try:
            loop.run_until_complete(phases(world))
        except Exception as error:
            violation = error
            trace_back = "" if isinstance(error, Violation) else "".join(traceback.format_exception(error))
        steps, seconds = loop.steps, loop.time()
        lines, digest = tuple(world.trace.lines), world.trace.digest
        loop.set_exception_handler(lambda _loop, _context: None)
        loop.end()
    return Result(
        seed=options.seed,
        digest=digest,
        steps=steps,
        virtual_seconds=seconds,
        operations=len(world.checks.operations),
        take_overs=world.checks.take_overs,
        violation=f"{violation or type(violation).__name__}\n{trace_back}".strip() if violation else "",
        guarantee=_guarantee(violation),
        lines=lines if violation else (),
    )


def _guarantee(violation: Exception | None) -> str:
    match violation:
        case None:
            return ""
        case Violation():
            return violation.guarantee
        case StepLimit():
            return "end"
        case _:
            return "internal error"


async def _phases(world: World) -> None:
    options = world.options
    clients, isolation = Clients(world), Isolation(world)
    for frontend in world.frontends:
        frontend.start()
    for machine in world.machines:
        machine.start()
    async with asyncio.TaskGroup() as group:
        looking = group.create_task(isolation.run())
        async with asyncio.TaskGroup() as safety:
            for fault in options.faults:
                safety.create_task(world.strike(fault))
            for request in options.requests:
                safety.create_task(clients.ask(request))
            safety.create_task(asyncio.sleep(options.safety_seconds))
        world.calm_down()
        await clients.resume_all()
        isolation.is_everyone_calm = True
        await _settled(world)
        await _aftermath(world)
        await _settled(world)  # a frontend may have begun a load of its own just after the first look
        await _routes_are_true(world)
        await judge_the_end(world, clients)
        looking.cancel()


async def _settled(world: World) -> None:
    limit = world.loop.time() + SETTLE_SECONDS
    while not is_settled(world):
        if world.loop.time() > limit:
            world.loop.fail(Violation("end", f"not settled after {SETTLE_SECONDS} s:\n{shown_open(world)}"))
        await asyncio.sleep(LOOK_SECONDS)


async def _aftermath(world: World) -> None:
    """Until all is shown that must be; a few runs wait on, in case something comes that nobody expects."""
    for _ in range(round(AFTERMATH_SECONDS / SHOWN_LOOK_SECONDS)):
        if world.options.seed % WAITS_ON and is_all_shown(world):
            break
        await asyncio.sleep(SHOWN_LOOK_SECONDS)


async def _routes_are_true(world: World) -> None:
    """A process that ended right after its row was written is known to be gone by the second heartbeat from then."""
    limit = world.loop.time() + ROUTE_SECONDS
    while stale := stale_routes(world):
        if world.loop.time() > limit:
            world.loop.fail(Violation("G13", f"rows of replicas without a process: {stale}"))
        await asyncio.sleep(LOOK_SECONDS)


def _unhandled(loop: SimLoop, context: dict[str, object]) -> None:
    loop.fail(Violation("internal error", f"{context.get('message')}: {context.get('exception')!r}"))


@contextlib.contextmanager
def _seeded(chance: Random) -> Iterator[None]:
    """Identifiers and tokens of the run are those of its seed."""
    real_uuid, real_token = uuid.uuid4, secrets.token_urlsafe
    uuid.uuid4 = lambda: uuid.UUID(int=chance.getrandbits(128), version=4)
    secrets.token_urlsafe = lambda nbytes=None: f"{chance.getrandbits(256):064x}"
    try:
        yield
    finally:
        uuid.uuid4, secrets.token_urlsafe = real_uuid, real_token


class _Listening(logging.Handler):
    """A loop that catches what is not one of our errors hides a bug: here it is told."""

    def __init__(self, loop: SimLoop) -> None:
        super().__init__(logging.WARNING)
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("loop.step_failed") and isinstance(record.args, tuple):
            name, _, error = record.args[:3]
            if isinstance(error, Exception) and not isinstance(error, EnginehouseError):
                place = error.__traceback__
                while place is not None and place.tb_next is not None:
                    place = place.tb_next
                where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place else "?"
                self._loop.fail(Violation("internal error", f"the loop {name} met {error!r} at {where}"))


@contextlib.contextmanager
def _heard(loop: SimLoop) -> Iterator[None]:
    heard = _Listening(loop)
    logger = logging.getLogger("enginehouse.loop")
    logger.addHandler(heard)
    try:
        yield
    finally:
        logger.removeHandler(heard)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the product logs of misfortunes that were made on purpose is not for the terminal."""
    logger = logging.getLogger("enginehouse")
    was, level = logger.propagate, logger.level
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    silent = logging.NullHandler()
    logger.addHandler(silent)
    try:
        yield
    finally:
        logger.propagate = was
        logger.setLevel(level)
        logger.removeHandler(silent)
