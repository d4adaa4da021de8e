"""One simulated frontend: the real objects and their real loops, in a process that can be killed and paused.

It is built as `build_frontend` does it, without HTTP: what the routes of nodes do around the objects is repeated here,
in as few lines as there.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from tests.sim.bus import SimBus
from tests.sim.clocks import SimClock
from tests.sim.loop import PROCESS, Process
from tests.sim.options import METAS
from tests.sim.registry import HOST
from tests.sim.store import SimStore
from tests.sim.trace import Violation

from enginehouse.build_frontend import Frontend, make_frontend, make_quiet_loops
from enginehouse.build_outside import Outside
from enginehouse.core import node_api
from enginehouse.core.errors import EnginehouseError, Unavailable
from enginehouse.core.gallery_entry import Gallery, GalleryEntry
from enginehouse.core.ids import NodeId
from enginehouse.core.model import Model, ModelFile
from enginehouse.frontend.delivery.collector import LATE_SECONDS
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.operations.targets import use_last_reports
from enginehouse.frontend.quiet_loops import GLANCE_SECONDS
from enginehouse.frontend.watching.board import CATCH_UP_SECONDS, HINTED_SECONDS, PUBLISH_SECONDS
from enginehouse.frontend.watching.hints import HINT_SECONDS
from enginehouse.frontend.watching.views import SilenceLimits
from enginehouse.loop import Loop, Wakes
from enginehouse.settings.programs import FrontendSettings

if TYPE_CHECKING:
    from tests.sim.world import World

T = TypeVar("T")
# Short, so that silences end within a run; the relations are those of the defaults.
STALE_SECONDS = 7.5
HEARTBEAT_SECONDS = 2.5
HEALTH_SECONDS = 2.0
# Whatever can be sent wakes the dispatcher; its interval is only the clock of waits, and a fifth of a run's cost.
DISPATCH_SECONDS = 3.0
HOPELESS_SECONDS = 30.0
LINK_SECONDS = (0.0005, 0.004)
LATE_LINK_SECONDS = (0.2, 3.0)  # packets lost and sent again


def gallery(name: str, backends: tuple[str, ...], models: tuple[str, ...]) -> Gallery:
    """Each gallery has its own version of every backend, and meta names for the first. The last is an image, whose tag
    moves. The models have one each.
    """
    metas = [GalleryEntry(name=one, capabilities={"default": backends[0]}) for one in METAS]
    entries = [GalleryEntry(name=one, uri=f"pypi:{one}=={name}", version=name) for one in backends[:-1]]
    entries.append(GalleryEntry(name=backends[-1], uri=f"{HOST}/{backends[-1]}:{name}", version=name))
    offered = [
        Model(name=one, backend=backend, files=(ModelFile("weights", f"builtin:{one}", f"{number:064x}"),))
        for number, (one, backend) in enumerate(zip(models, (METAS[0], *backends[1:]), strict=False))
    ]
    return Gallery(name=name, url=f"{name}:", backends=(*metas, *entries), models=tuple(offered))


WATCHED_SECONDS, WATCHED_LIMIT_SECONDS = 2.0, 20.0  # of canaries
CANARY_SECONDS = 3.0  # between two looks at canaries; ends of intents wake it too
LOAD_SECONDS = 5.0  # whatever moves a load wakes it
RECONCILE_SECONDS = 5.0
POLL_SECONDS = 0.5  # a node that nothing is asked of is asked every sixth time
PATIENCE = SilenceLimits(4.0, 6.0, 6.0)  # with a worker that says nothing: twice that until it is sent again
WRITE_SECONDS = 1.0  # twice as often as in earnest: more chances for an older number to come after a newer one


class SimFrontend:
    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self.name = f"frontend-{number}"
        self.process: Process | None = None
        self.objects: Frontend | None = None  # while it serves
        self._calls: dict[asyncio.Future[Any], None] = {}  # in their order: a set would have one of its own

    def start(self) -> None:
        self.process = self._world.loop.new_process(self.name)
        self.process.spawn(self._run())

    def kill(self) -> None:
        if self.process is None:
            return
        self._world.trace.note(self.name, "killed")
        self.process.kill()
        self._world.network.remove_process(self.process)
        self.process = self.objects = None
        for call in list(self._calls):
            if not call.done():
                call.set_exception(Unavailable("cannot reach the frontend: connection reset", code="connection_lost"))

    async def _run(self) -> None:
        world = self._world
        bus = SimBus(world.network)
        while True:
            objects, loops = self._build(bus)
            try:
                await objects.board.restore()
                await self._listen(objects, bus)
                break
            except Unavailable:
                await bus.close()
                bus = SimBus(world.network)
                await asyncio.sleep(0.5)
        self.objects = objects
        world.trace.note(self.name, f"serves as {objects.dispatcher.owner[:8]}")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(objects))
            for loop in loops.values():
                group.create_task(loop.run())

    async def _listen(self, objects: Frontend, bus: SimBus) -> None:
        await objects.collector.listen(bus)
        await objects.poller.listen(bus)
        await objects.hints.listen()

    def _build(self, bus: SimBus) -> tuple[Frontend, dict[str, Loop]]:
        world, wakes = self._world, Wakes()
        lease = world.options.lease_seconds
        settings = FrontendSettings(
            data=Path("/nowhere"),
            heartbeat_seconds=HEARTBEAT_SECONDS,
            stale_seconds=STALE_SECONDS,
            lease_seconds=lease,
            stall_seconds=PATIENCE.stall_seconds,
            backend_install_timeout_seconds=PATIENCE.install_seconds,
            backend_upgrade_timeout_seconds=PATIENCE.upgrade_seconds,
            canary_seconds=WATCHED_SECONDS,
            canary_limit_seconds=WATCHED_LIMIT_SECONDS,
            approve_keys=tuple(machine.public_key for machine in world.machines if machine.public_key),
        )
        outside = Outside(
            store=SimStore(world.database, world.store_weather, world.chance("store"), world.committed),
            bus=bus,
            clock=SimClock(world.loop.time, world.chance(self.name)),
            ask_registry=world.registry.ask,
            galleries=Galleries(world.galleries),
            owner=str(uuid.uuid4()),
            verify=lambda *_: True,
            pace=world.pace,
            # Without such workers nobody is asked, and to look for them is part of a run's cost.
            freshen=None if world.options.old_nodes else use_last_reports,
        )
        made = make_frontend(self._set(settings), outside, wakes)
        loops = wakes.loops
        dispatcher, collector, board, poller = made.dispatcher, made.collector, made.board, made.poller
        for loop in (
            Loop("dispatch", self._while_open(dispatcher.step), DISPATCH_SECONDS),
            Loop("renew", self._while_open(dispatcher.renew_step), lease / 6),
            Loop("collect", collector.replies_step, 0.0),
            Loop("late-replies", collector.late_step, LATE_SECONDS),
            Loop("write-progress", collector.write_progress_step, WRITE_SECONDS),
            Loop("health", made.nodes.step, HEALTH_SECONDS),
            Loop("publish", board.step, PUBLISH_SECONDS),
            Loop("catch-up", self._only_news(board.catch_up_step), CATCH_UP_SECONDS, spacing_seconds=HINTED_SECONDS),
            Loop("hint", made.hints.step, HINT_SECONDS),
            Loop("hopeless", made.cancellation.hopeless_step, HOPELESS_SECONDS),
            Loop("load", self._while_steered(made.loader.step), LOAD_SECONDS),
            Loop("canary", self._while_open(made.canaries.step), CANARY_SECONDS),
            # Here for drains; once calm, nothing may begin by itself.
            Loop("reconcile", self._while_steered(made.reconciler.step), RECONCILE_SECONDS),
            Loop("poll", poller.step, POLL_SECONDS),
            Loop("poll-answers", poller.answers_step, POLL_SECONDS),
        ):
            if not loop.name.startswith("poll") or world.options.old_nodes:  # nobody else is ever asked
                loops[loop.name] = loop
        loops |= {loop.name: loop for loop in self._more_loops(made)}
        quiet = make_quiet_loops(made)
        quiet.hold(loops.values())
        loops["glance"] = Loop("glance", self._where_anything_happens(quiet.step), GLANCE_SECONDS)
        return made, loops

    def _set(self, settings: FrontendSettings) -> FrontendSettings:
        return settings

    def _more_loops(self, made: Frontend) -> list[Loop]:
        return []

    def _while_open(self, step: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        """The same step, left out while no intent is open anywhere: it would find nothing."""
        checks = self._world.checks

        async def look() -> None:
            if checks.open_count:
                await step()

        return look

    def _while_steered(self, step: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        """The same step, left out while no load is under way."""

        async def look() -> None:
            if self._world.checks.steered:
                await step()

        return look

    def _where_anything_happens(self, step: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        """The same step, left out while no intent is open and no row has changed since it last ended well."""
        checks, only_news = self._world.checks, self._only_news(step)

        async def look() -> None:
            await (step() if checks.open_count else only_news())

        return look

    def _only_news(self, step: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        """The same step, left out where no row has changed since it last ended well: it would find nothing, and looks
        of that kind are a quarter of a run's cost.
        """
        changes, seen = self._world.database.changes, -1

        async def look() -> None:
            nonlocal seen
            news = changes.news
            if news != seen:
                await step()
                seen = news

        return look

    async def _watch(self, objects: Frontend) -> None:
        checks = self._world.watched(self.name)
        with objects.events.watch() as watcher:
            while True:
                await watcher.wait()
                for event in watcher.take():
                    if event.kind == "operation":
                        checks.told(event.body)

    # What HTTP carries ----------------------------------------------------------------------------

    async def call(self, work: Callable[[Frontend], Awaitable[T]], limit_seconds: float) -> T:
        """Have `work` done over there. What it raises of ours comes back; a lost connection is `connection_lost`."""
        loop = self._world.loop
        caller = PROCESS.get(loop.outside)
        await asyncio.sleep(self._on_the_way())
        if self.process is None or self.objects is None:
            raise Unavailable("cannot reach the frontend: connection refused", code="connection_refused")
        objects = self.objects
        answer: asyncio.Future[T] = loop.create_future()

        def send(result: T | None, error: Exception | None) -> None:
            if not answer.done():
                answer.set_exception(error) if error is not None else answer.set_result(result)  # type: ignore[arg-type]

        async def serve() -> None:
            try:
                result = await work(objects)
            except EnginehouseError as error:
                loop.call_later(self._on_the_way(), send, None, error, context=caller.context)
            except Exception as error:
                loop.fail(Violation("internal error", f"{self.name} answered a call with {error!r}"))
            else:
                loop.call_later(self._on_the_way(), send, result, None, context=caller.context)

        self._calls[answer] = None
        try:
            self.process.spawn(serve())
            async with asyncio.timeout(limit_seconds):
                return await answer
        except TimeoutError as error:
            raise Unavailable("cannot get an answer from the frontend in time", code="connection_lost") from error
        finally:
            del self._calls[answer]

    def _on_the_way(self) -> float:
        chance, late_rate = self._world.chance("link"), self._world.late_link_rate
        return chance.uniform(*(LATE_LINK_SECONDS if late_rate and chance.random() < late_rate else LINK_SECONDS))


async def register(objects: Frontend, request: node_api.RegisterRequest) -> node_api.RegisterReply:
    registered = await objects.nodes.register(request)
    node = registered.node
    if not node.report.is_whole:
        await objects.reports.restarted(node.id)
    return node_api.RegisterReply(
        id=node.id,
        name=node.name,
        node_type=node.node_type,
        status=node.status,
        created_at="",
        node_token=registered.token,
        heartbeat_seconds=HEARTBEAT_SECONDS,
        mark=registered.now,
    )


async def heartbeat(objects: Frontend, node_id: NodeId, request: node_api.HeartbeatRequest) -> node_api.HeartbeatReply:
    answer = await objects.reports.heartbeat(node_id, request)
    return node_api.HeartbeatReply(message="heartbeat received", **msgspec.structs.asdict(answer))
