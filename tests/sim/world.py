"""Everything of one run: the loop, the weather of each part, the processes, and the ledgers that judge them.

It strikes processes as the options say and keeps book of who was left in peace since when, because some promises are
made only to those.
"""

from __future__ import annotations

import asyncio
import json
from random import Random

from tests.sim.bus import BusWeather, Network
from tests.sim.disk import DiskWeather
from tests.sim.frontends import SimFrontend, gallery
from tests.sim.ledgers import StoreChecks
from tests.sim.loop import Process, SimLoop
from tests.sim.machines import SimMachine
from tests.sim.old import SimOldMachine
from tests.sim.options import BACKENDS, GALLERIES, MODELS, Fault, Options
from tests.sim.parts import InstallWeather
from tests.sim.proving import is_anew, prove
from tests.sim.registry import SimRegistry
from tests.sim.rows import Changed, IntentRow, OperationRow, select_rows
from tests.sim.store import EPOCH, Database, StoreWeather
from tests.sim.trace import Trace, Violation
from tests.sim.watching import Watched

from enginehouse.core.gallery_entry import Gallery
from enginehouse.core.pace import USUAL

SLOWNESS = 150.0  # of a slow store: a transaction takes from 60 ms to over a second
JOINING_SECONDS = 3.0  # after a disturbance, until a worker is a node again
SILENT_SECONDS = 15.0  # without a bus: noticed, not called away at once, a heartbeat, and lost packets


class World:
    pace = USUAL

    def __init__(self, options: Options, loop: SimLoop, database: Database) -> None:
        self.options = options
        self.loop = loop
        self.database = database
        self.trace = Trace(loop.time)
        self._chances: dict[str, Random] = {}
        self.store_weather = StoreWeather(options.collision_rate, options.unknown_rate, set())
        self.bus_weather = BusWeather(
            options.drop_rate, options.duplicate_rate, options.late_rate, options.late_seconds, options.reorder_rate, {}
        )
        self.disk_weather = DiskWeather(options.full_disk_rate, options.disk_error_rate, options.read_error_rate)
        self.install_weather = InstallWeather(
            options.install_seconds, options.failing_rate, options.hopeless_rate, options.stalling_rate
        )
        self.cut_links: set[str] = set()
        self.late_link_rate = options.late_link_rate
        self.confirmed: dict[str, str] = {}  # author -> operation, where the commit was confirmed to the frontend
        self.checks = StoreChecks(self._store_time, loop.fail, options.nodes, self._prove)
        self.network = Network(loop, self.chance("bus"), self.bus_weather, self.trace)
        self.registry = SimRegistry(loop.time, options.tag_moves_at)
        self.galleries = [self._gallery(name) for name in GALLERIES]
        self.machines = [self._machine(number) for number in range(options.nodes)]
        self.frontends = [self._frontend(number) for number in range(options.frontends)]
        self.calm_at = 0.0  # from then on nothing goes wrong
        self._watchers: dict[str, Watched] = {}
        self._struck: dict[str, int] = {}
        self._calm_since: dict[str, float] = {}

    def _machine(self, number: int) -> SimMachine | SimOldMachine:
        """The last ones are old, every other of them so old that it knows no upgrades."""
        if number >= self.options.nodes - self.options.old_nodes:
            return SimOldMachine(self, number, knows_upgrades=self.options.seed % 2 == 0)
        return SimMachine(self, number)

    def _frontend(self, number: int) -> SimFrontend:
        return SimFrontend(self, number)

    def _gallery(self, name: str) -> Gallery:
        return gallery(name, BACKENDS, MODELS)

    def chance(self, name: str) -> Random:
        if name not in self._chances:
            self._chances[name] = Random(f"{self.options.seed}/{name}")
        return self._chances[name]

    def _store_time(self) -> float:
        return EPOCH + self.loop.time()

    def committed(self, who: str, changes: list[Changed], confirmed: bool) -> None:
        for changed in changes:
            self.trace.note(who, _shown(changed))
            if changed.before is None and isinstance(changed.after, OperationRow) and confirmed:
                self.confirmed[changed.after.author] = changed.after.id
        self.checks.committed(changes)

    def _prove(self, intent: IntentRow) -> None:
        """An intent has succeeded: was it so?"""
        for machine in self.machines:
            if machine.node_id == intent.node_id:
                wrong = prove(intent, machine.checks, is_old=machine.is_old)
                machine.checks.judge("G10", wrong)
                if isinstance(machine, SimOldMachine):
                    machine.checks.judge("G10", machine.wrong_absence(intent))
                else:
                    machine.checks.judge("G2", self._is_what_the_tag_meant(intent))

    def _is_what_the_tag_meant(self, intent: IntentRow) -> str:
        """Whoever installs an image after its delete gets what its tag means, from the asking on."""
        authors = select_rows(
            self.database.connection,
            "select author from operations join operation_intents on operation_id = id where intent_id = ?",
            (intent.id,),
        )
        asked_at = {f"client-{request.number}": request.at for request in self.options.requests}
        known = [asked_at[str(author)] for (author,) in authors if author in asked_at]
        if not known or not is_anew(intent, self.checks.intents.values()):
            return ""
        action, outcome = json.loads(intent.action), json.loads(intent.outcome or "{}")
        meant = self.registry.meant_since(action["resolved"]["uri"], min(known))
        if outcome.get("digest") in meant:
            return ""
        return f"intent {intent.id} came after a delete and succeeded with what its tag no longer meant: {outcome}"

    def watched(self, name: str) -> Watched:
        watcher = Watched(name, self.loop.time, self.loop.fail)
        self._watchers[name] = watcher
        return watcher

    def living_watchers(self) -> list[Watched]:
        return list(self._watchers.values())

    def calm_seconds(self, *names: str) -> float:
        """For how long none of these was struck by anything."""
        if any(self._struck.get(name, 0) for name in names):
            return 0.0
        return self.loop.time() - max((self._calm_since.get(name, 0.0) for name in names), default=0.0)

    # Misfortune -----------------------------------------------------------------------------------

    async def strike(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at)
        struck = self._struck_by(fault)
        self.trace.note("fault", f"{fault.kind} {struck} for {fault.seconds:.2f} s")
        self._struck[struck] = self._struck.get(struck, 0) + 1
        try:
            await self._strike(fault)
        finally:
            self._struck[struck] -= 1
            self._calm_since[struck] = self.loop.time()
            self.trace.note("fault", f"{fault.kind} {struck} is over")

    def _struck_by(self, fault: Fault) -> str:
        if fault.kind == "store_away":
            return "store"
        if "frontend" in fault.kind or "store" in fault.kind:
            return self.frontends[fault.target % len(self.frontends)].name
        return self.machines[fault.target % len(self.machines)].name

    async def _strike(self, fault: Fault) -> None:
        frontend = self.frontends[fault.target % len(self.frontends)]
        machine = self.machines[fault.target % len(self.machines)]
        match fault.kind:
            case "kill_frontend":
                frontend.kill()
                await asyncio.sleep(fault.seconds)
                if frontend.process is None:
                    frontend.start()
            case "kill_worker" | "power_cut":
                machine.kill(power_cut=fault.kind == "power_cut")
                await asyncio.sleep(fault.seconds)
                if machine.process is None and not machine.is_lost:
                    machine.start()
            case "lose_worker":
                machine.is_lost = True
                machine.kill()  # for ever
            case "stop_worker":
                machine.stop()
                await asyncio.sleep(fault.seconds)
                machine.kill()
                if not machine.is_lost:
                    machine.start()
            case "pause_frontend":
                await self._pause(frontend.process, fault.seconds)
            case "pause_worker":
                await self._pause(machine.process, fault.seconds)
            case "cut_bus_of_frontend":
                await self._cut(frontend.name, fault.seconds)
            case "cut_bus_of_worker":
                await self._cut(machine.name, fault.seconds)
                self._judge_silence(machine, fault.seconds)
            case "cut_link":
                self.cut_links.add(machine.name)
                await asyncio.sleep(fault.seconds)
                self.cut_links.discard(machine.name)
            case "store_away" | "store_away_for_one":
                whom = "" if fault.kind == "store_away" else frontend.name
                self.store_weather.away_for.add(whom)
                await asyncio.sleep(fault.seconds)
                self.store_weather.away_for.discard(whom)
            case "crash_engine" | "lose_engines":
                machine.crash_engine(all_of_them=fault.kind == "lose_engines")
            case "store_slow":
                process = frontend.process
                if process is not None:
                    process.slowness = SLOWNESS
                    await asyncio.sleep(fault.seconds)
                    process.slowness = 1.0

    async def _pause(self, process: Process | None, seconds: float) -> None:
        if process is not None and not process.is_frozen:
            process.is_frozen = True
            await asyncio.sleep(seconds)
            process.is_frozen = process.is_dead

    async def _cut(self, name: str, seconds: float) -> None:
        self.bus_weather.cut[name] = self.loop.time()
        await asyncio.sleep(seconds)
        self.bus_weather.cut.pop(name, None)

    def _judge_silence(self, machine: SimMachine | SimOldMachine, seconds: float) -> None:
        """G19: without the bus a worker is heard over HTTP, where nothing else was in the way."""
        others = [one.name for one in self.frontends] + ["store"]
        began = self.loop.time() - seconds
        is_alone = self._struck[machine.name] == 1 and self._calm_since.get(machine.name, 0.0) < began - JOINING_SECONDS
        if machine.is_old or not machine.node_id or not is_alone or began < JOINING_SECONDS:
            return
        silent = self.loop.time() - machine.heard_at
        if min(seconds, self.calm_seconds(*others) - JOINING_SECONDS) > SILENT_SECONDS < silent:
            what = f"{machine.name} was not heard for {silent:.1f} s, and only its bus was away"
            self.loop.fail(Violation("G19", what))

    def calm_down(self) -> None:
        """From now on nothing new goes wrong."""
        self.trace.note("world", "faults off")
        self.calm_at = self.loop.time()
        self.store_weather.collision_rate = self.store_weather.unknown_rate = 0.0
        weather = self.bus_weather
        weather.drop_rate = weather.duplicate_rate = weather.late_rate = weather.reorder_rate = 0.0
        disk = self.disk_weather
        disk.full_rate = disk.error_rate = disk.read_error_rate = 0.0
        self.late_link_rate = 0.0
        install = self.install_weather
        install.failing_rate = install.hopeless_rate = install.stalling_rate = 0.0
        install.seconds = min(install.seconds, 0.5)  # the long ones have had their time


def _shown(changed: Changed) -> str:
    before, after = changed.before, changed.after
    row = after or before
    assert row is not None
    if isinstance(row, IntentRow):
        was = f"{before.state} -> " if isinstance(before, IntentRow) else ""
        return (
            f"intent {row.id[:8]} {was}{row.state} {row.subject} generation {row.generation} attempt {row.attempt} "
            f"fence {row.fence} v{row.version} {row.reason}"
        )
    return f"operation {row.id[:8]} {row.kind} {row.name} by {row.author}"
