"""The world of a run about serving: the other one, and what is really true of engines, requests and memory.

Nothing here is told by the product: engines say when they begin and end, callers when they use one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import msgspec
from msgspec import Struct
from tests.sim.disk import Engine
from tests.sim.frontends import SimFrontend, gallery
from tests.sim.loop import Process, SimLoop
from tests.sim.machines import SimMachine
from tests.sim.options import BACKENDS, Fault
from tests.sim.rows import Changed, select_rows
from tests.sim.serving.frontends import ServingFrontend
from tests.sim.serving.ledger import ServingLedger
from tests.sim.serving.machines import ServingMachine
from tests.sim.serving.options import ServingOptions
from tests.sim.store import Database
from tests.sim.trace import Violation
from tests.sim.world import World

from enginehouse.core.demand import configured_memory
from enginehouse.core.gallery_entry import Gallery
from enginehouse.core.model import Model, ModelFile
from enginehouse.core.pace import ServingPace
from enginehouse.frontend.serving.counts import FORGET_SECONDS

# What is waited for, at a quarter of its real length, as STALE and heartbeats are: the relations stay.
QUICK = ServingPace(
    scale_down_seconds=30.0,
    scale_up_seconds=2.5,
    retry_seconds=4.0,
    max_retry_seconds=24.0,
    cool_down_seconds=2.5,
    reserved_seconds=15.0,
    settled_seconds=150.0,
    evict_seconds=3.0,
    drain_seconds=7.5,
    idle_seconds=4.0,
)
COUNTED_SECONDS = FORGET_SECONDS + 3.0


class Use(Struct, eq=False):
    """A request that an engine is answering, for a frontend."""

    nonce: str
    since: float
    process: Process


class ServingWorld(World):
    pace = QUICK

    def __init__(self, serving: ServingOptions, loop: SimLoop, database: Database) -> None:
        self.serving = serving
        self._uses: dict[str, list[Use]] = {}
        self._used_at: dict[str, float] = {}  # when the last request ended
        self._choosing: dict[str, int] = {}  # callers by model
        self.engines: dict[str, tuple[ServingMachine, Engine]] = {}  # by nonce, those that have ended too
        self.began_at: dict[str, float] = {}
        self.ended_at: dict[str, float] = {}
        self.deleted_at: dict[str, float] = {}  # model -> when its deletion was last confirmed
        self.maybe_deleted: set[str] = set()
        super().__init__(serving.weather, loop, database)
        self.ledger = ServingLedger(self)

    @property
    def serving_machines(self) -> list[ServingMachine]:
        return [one for one in self.machines if isinstance(one, ServingMachine)]

    def _machine(self, number: int) -> SimMachine:
        return ServingMachine(self, number)

    def _frontend(self, number: int) -> SimFrontend:
        return ServingFrontend(self, number)

    def _gallery(self, name: str) -> Gallery:
        offered = gallery(name, BACKENDS, ())
        models = [
            Model(
                name=one.name,
                backend=one.backend,
                files=(ModelFile("weights", f"builtin:{one.name}", f"{number:064x}"),),
                config={"memory": one.memory_bytes} if one.is_known else {},
            )
            for number, one in enumerate(self.serving.models)
        ]
        return msgspec.structs.replace(offered, models=tuple(models))

    def committed(self, who: str, changes: list[Changed], confirmed: bool) -> None:
        super().committed(who, changes, confirmed)
        self.ledger.committed(changes)

    def _struck_by(self, fault: Fault) -> str:
        """The end of an engine strikes nobody else: its worker goes on, and tells of it."""
        struck = super()._struck_by(fault)
        return f"engines of {struck}" if fault.kind in ("crash_engine", "lose_engines") else struck

    # What is true ---------------------------------------------------------------------------------

    def memory_of(self, model: Model) -> int:
        return configured_memory(model) or next(
            one.memory_bytes for one in self.serving.models if one.name == model.name
        )

    def is_known(self, model: str) -> bool:
        """Whether its demand is known before it runs."""
        return next(one.is_known for one in self.serving.models if one.name == model)

    def checks_key(self, model: str) -> bool:
        return next(one.checks_key for one in self.serving.models if one.name == model)

    def began(self, machine: ServingMachine, engine: Engine) -> None:
        self.engines[engine.nonce] = (machine, engine)
        self.began_at[engine.nonce] = self.loop.time()
        self.ledger.began(machine, engine)

    def ended(self, engine: Engine) -> None:
        self.ended_at[engine.nonce] = self.loop.time()

    def may_be_absent(self, model: str) -> bool:
        """Whether it has no row: nobody asked for it yet, or it was deleted."""
        is_row = bool(select_rows(self.database.connection, "select 1 from models where name = ?", (model,)))
        return model in self.maybe_deleted or not is_row

    def is_alive(self, nonce: str) -> bool:
        return nonce in self.engines and nonce not in self.ended_at

    def engine_at(self, address: str) -> Engine | None:
        """Whoever listens there now; nobody where the machine cannot be reached."""
        for machine in self.serving_machines:
            if machine.name not in self.cut_links:
                for engine in machine.disk.engines.values():
                    if engine.address == address:
                        return engine
        return None

    def uses_of(self, nonce: str) -> list[Use]:
        """The requests that it answers, of frontends that live."""
        return [use for use in self._uses.get(nonce, ()) if not use.process.is_dead]

    def told_seconds(self, use: Use, now: float) -> float:
        """For how long others can know of a request: its frontend was left in peace, and so was the store."""
        return min(now - use.since, self.calm_seconds(use.process.name, "store"))

    def uses_lately(self, nonce: str) -> bool:
        """Whether somebody may be counted to use it: a count that was told lasts a few seconds."""
        return bool(self._uses.get(nonce)) or self.loop.time() - self._used_at.get(nonce, -100.0) < COUNTED_SECONDS

    @contextlib.contextmanager
    def choosing(self, model: str) -> Iterator[None]:
        """While a caller is given a route: one that is still to be proven is counted, and not yet known here."""
        self._choosing[model] = self._choosing.get(model, 0) + 1
        try:
            yield
        finally:
            self._choosing[model] -= 1

    def may_all_be_used(self, model: str, nonces: Collection[str]) -> bool:
        """Whether each of these may be counted as busy."""
        return sum(not self.uses_lately(one) for one in nonces) <= self._choosing.get(model, 0)

    def is_unused(self) -> bool:
        """Whether no engine may be counted as busy any more."""
        soon = self.loop.time() - COUNTED_SECONDS
        return not any(self.uses_of(one) for one in self._uses) and all(at <= soon for at in self._used_at.values())

    def note_use(self, nonce: str) -> None:
        self._used_at[nonce] = self.loop.time()

    @contextlib.contextmanager
    def using(self, nonce: str, process: Process) -> Iterator[None]:
        use = Use(nonce, self.loop.time(), process)
        self._uses.setdefault(nonce, []).append(use)
        try:
            yield
        finally:
            self._uses[nonce].remove(use)
            self.note_use(nonce)

    def judge(self, guarantee: str, wrong: str) -> None:
        if wrong:
            self.loop.fail(Violation(guarantee, wrong))
