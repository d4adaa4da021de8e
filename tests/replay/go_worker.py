"""A worker that says what LocalAI's said: it registers by HTTP, sends heartbeats without reports, listens to its
subjects on a real bus and answers each request with what is next in its script.

It obeys nothing: what is "installed" is the listing that its script says it has. Ids of ours take the place of recorded
ones, and recorded seconds pass faster.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import msgspec
from msgspec import Struct, field
from tests.replay.frontends import Frontends, RunningFrontend, until
from tests.replay.lab import Lab
from tests.replay.recordings import (
    FIRST_NODE,
    SECOND_NODE,
    Exchange,
    Payload,
    exchanges,
    filled_in,
    registration,
)

from enginehouse.bus.nats import BusOptions, NatsBus
from enginehouse.core import subjects
from enginehouse.core.errors import Unavailable
from enginehouse.core.ids import NodeId
from enginehouse.ports import Message

# LocalAI's order; a worker older than some of them is made with less.
VERBS = (
    *(subjects.INSTALL, subjects.UPGRADE, subjects.STOP, subjects.DELETE, subjects.LIST, subjects.RUNNING),
    *(subjects.UNLOAD, subjects.STOP_MODEL, subjects.DELETE_MODEL, subjects.STOP_NODE),
)
# Keys and kinds of values as in sample 01.
BODY: Payload = {
    "address": "127.0.0.1:20101",
    "available_disk": 81231437824,
    "available_ram": 24618422272,
    "available_vram": 0,
    "capability": "default",
    "gpu_compute_capability": "",
    "gpu_vendor": "",
    "http_address": "127.0.0.1:19001",
    "labels": {"node.replica-slots": "1"},
    "max_replicas_per_model": 1,
    "total_disk": 270553174016,
    "total_ram": 25274793984,
    "total_vram": 0,
}
HEARTBEAT: Payload = {"available_disk": 81231355904, "available_ram": 24620552192, "total_disk": 270553174016}
HEARTBEAT_SECONDS = 0.2
SPEED = 20.0  # recorded seconds in one: seven seconds of download are a third of one here


class Answer(Struct, kw_only=True):
    """What is said to one request. `then` is what the worker lists from the moment of the reply; without `reply` it
    stays silent.
    """

    reply: Payload | None
    progress: Sequence[tuple[float, Payload]] = ()
    seconds: float = 0.0
    then: Payload | None = None
    gate: asyncio.Event | None = None  # the reply waits for it


def recorded(exchange: Exchange, *, then: Payload | None = None, gate: asyncio.Event | None = None) -> Answer:
    return Answer(reply=exchange.reply, progress=exchange.progress, seconds=exchange.took, then=then, gate=gate)


class GoWorker(Struct, kw_only=True):
    """Made by `go_worker`."""

    name: str
    node_id: NodeId
    bus: NatsBus
    bus_url: str
    replacements: dict[str, str]
    group: asyncio.TaskGroup
    verbs: Sequence[str]
    is_beating: bool = True
    listing: Payload = field(default_factory=lambda: {"backends": None})
    running: Payload = field(default_factory=lambda: {"models": []})
    heard: list[tuple[str, Payload]] = field(default_factory=list)  # without the questions what there is
    stopped: list[str] = field(default_factory=list)
    scripts: dict[str, list[Answer]] = field(default_factory=dict)
    told: list[float] = field(default_factory=list)  # percentages of the progress that was sent
    on_told: Callable[[str], Awaitable[None]] | None = None  # with the operation
    faults: list[Exception] = field(default_factory=list)  # of the script; a worker goes on
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def will(self, verb: str, *answers: Answer) -> None:
        """Answer the next requests so."""
        self.scripts.setdefault(verb, []).extend(answers)

    def has(self, listing: Payload) -> None:
        self.listing = filled_in(listing, self.replacements)

    async def listen(self) -> None:
        for verb in self.verbs:
            await self.bus.subscribe(subjects.node_subject(self.node_id, verb), partial(self._receive, verb))

    async def lose_bus(self, *, is_beating: bool) -> None:
        """From now on nobody listens on its subjects."""
        self.is_beating = is_beating
        await self.bus.close()

    async def find_bus(self) -> None:
        self.bus = await NatsBus.connect(BusOptions(url=self.bus_url, name=self.name), limit_seconds=10)
        await self.listen()
        self.is_beating = True

    def requests(self, verb: str) -> list[Payload]:
        return [payload for heard, payload in self.heard if heard == verb]

    async def hears(self, verb: str, count: int = 1) -> list[Payload]:
        async def probe() -> bool:
            return len(self.requests(verb)) >= count

        await until(probe, f"{self.name} to hear {verb} {count} times")
        return self.requests(verb)

    def _receive(self, verb: str, message: Message) -> None:
        task = self.group.create_task(self.kept(partial(self._answer, verb, message)))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def kept(self, work: Callable[[], Awaitable[None]]) -> None:
        """A fault ends the test that it belongs to, and not the loop that all tests share."""
        try:
            with contextlib.suppress(Unavailable):  # its bus was closed under it
                await work()
        except Exception as error:
            self.faults.append(error)

    async def _answer(self, verb: str, message: Message) -> None:
        if verb in (subjects.LIST, subjects.RUNNING):
            await self.bus.publish(
                message.reply, msgspec.json.encode(self.listing if verb == subjects.LIST else self.running)
            )
            return
        request: Payload = msgspec.json.decode(message.payload)
        if verb == subjects.STOP:
            self._stop(request["backend"])
            return
        self.heard.append((verb, request))
        script = self.scripts.get(verb, [])
        assert script, f"{self.name} was asked {verb} once too often: {request}"
        # The last answer is for every further request: a worker does not change its mind.
        answer = script.pop(0) if len(script) > 1 else script[0]
        passed = 0.0
        for at, event in answer.progress:
            await asyncio.sleep(max(0.0, (at - passed) / SPEED))
            passed = at
            await self._tell(event, request)
        await asyncio.sleep(max(0.0, (answer.seconds - passed) / SPEED))
        if answer.gate is not None:
            await answer.gate.wait()
        if answer.then is not None:
            self.has(answer.then)
        if answer.reply is not None:
            await self.bus.publish(message.reply, msgspec.json.encode(filled_in(answer.reply, self.replacements)))

    def _stop(self, key: str) -> None:
        """By its exact key, which is all that is ever sent here."""
        left = [one for one in self.running["models"] if f"{one['model_id']}#{one['replica_index']}" != key]
        assert len(left) < len(self.running["models"]) or key in self.stopped, f"{self.name} runs no {key}"
        self.running = {"models": left}
        self.stopped.append(key)

    async def _tell(self, event: Payload, request: Payload) -> None:
        op_id = request.get("op_id", "")
        mine = {**filled_in(event, self.replacements), "op_id": op_id, "node_id": self.node_id}
        mine["backend"] = request["backend"]
        self.told.append(float(event["percentage"]))
        await self.bus.publish(subjects.progress_subject(self.node_id, op_id), msgspec.json.encode(mine))
        if self.on_told is not None:
            await self.on_told(op_id)


@asynccontextmanager
async def go_worker(
    frontend: RunningFrontend, bus_url: str, lab: Lab, name: str, *, verbs: Sequence[str] = VERBS, body: Payload = BODY
) -> AsyncIterator[GoWorker]:
    """Registered, approved, listening and healthy."""
    join = frontend.join_token
    answer = await frontend.ask("POST", "/api/node/register", {**body, "name": name, "token": join}, token=join)
    assert answer.status == 201, answer.body
    node_id = str(answer.json["id"])
    assert answer.json["status"] == "pending"
    await frontend.post(f"/api/nodes/{node_id}/approve")
    async with asyncio.TaskGroup() as group:
        bus = await NatsBus.connect(BusOptions(url=bus_url, name=name), limit_seconds=10)
        made = GoWorker(
            name=name,
            node_id=NodeId(node_id),
            bus=bus,
            bus_url=bus_url,
            replacements=lab.replacements,
            group=group,
            verbs=verbs,
        )
        await made.listen()
        beating = group.create_task(made.kept(partial(_beat, frontend, made, join)))
        try:
            await frontend.sees(name, "healthy")
            yield made
        finally:
            for task in (beating, *made.tasks):
                task.cancel()
            await made.bus.close()
    assert not made.faults, made.faults


async def _beat(frontend: RunningFrontend, worker: GoWorker, token: str) -> None:
    while True:
        if worker.is_beating:
            await frontend.ask("POST", f"/api/node/{worker.node_id}/heartbeat", HEARTBEAT, token=token)
        await asyncio.sleep(HEARTBEAT_SECONDS)


class Pair(Struct, frozen=True):
    """Two workers as in the recordings."""

    first: GoWorker
    second: GoWorker

    @property
    def heard(self) -> list[tuple[str, Payload]]:
        return self.first.heard + self.second.heard

    @classmethod
    @asynccontextmanager
    async def opened(cls, frontends: Frontends, lab: Lab, *, second_lacks: Sequence[str] = ()) -> AsyncIterator[Pair]:
        """With the registrations of sample 01. One joins each frontend."""
        verbs = [verb for verb in VERBS if verb not in second_lacks]
        url = frontends.bus_url
        bodies = [registration(name) for name in ("worker-1", "worker-2")]
        async with (
            go_worker(frontends.first, url, lab, "worker-1", body=bodies[0]) as first,
            go_worker(frontends.second, url, lab, "worker-2", body=bodies[1], verbs=verbs) as second,
        ):
            for worker, node_id in ((first, FIRST_NODE), (second, SECOND_NODE)):
                (said,) = exchanges("16-models-running", subjects.RUNNING, node_id=node_id)
                assert said.reply is not None
                worker.running = said.reply
            yield cls(first, second)
