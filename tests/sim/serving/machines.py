"""A machine that serves: the simulated one with an address, a number of slots, and memory that engines take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.sim.disk import Engine
from tests.sim.machines import SimHardware, SimMachine
from tests.sim.serving.engines import ServingSupervisor

from enginehouse.core.capacity import Capacity
from enginehouse.loop import Signal
from enginehouse.worker.engines.ports import PortPace, Ports

if TYPE_CHECKING:
    from tests.sim.serving.world import ServingWorld

FIRST_PORT = 50052
PORTS = 8  # few, so that they are used again
# At a quarter of their real length, as other waits are.
PORT_PACE = PortPace(rest_seconds=4.0, unchecked_rest_seconds=75.0, affinity_seconds=8.0)


class ServingMachine(SimMachine):
    def __init__(self, world: ServingWorld, number: int) -> None:
        super().__init__(world, number)
        self.world = world
        self.host = f"10.0.0.{number + 1}"
        self.slots = world.serving.slots[number]
        self.memory_bytes = world.serving.memories[number]
        # As the real one, whose file outlives its worker.
        self.ports = Ports(FIRST_PORT, world.loop.time, count=PORTS, pace=PORT_PACE)
        self.coming: dict[str, int] = {}  # what starts take that are under way
        self.disk.on_end.append(self._ended)

    @property
    def used_bytes(self) -> int:
        running = {key: engine.memory_bytes for key, engine in self.disk.engines.items()}
        return sum((self.coming | running).values())

    def kill(self, *, power_cut: bool = False) -> None:
        super().kill(power_cut=power_cut)
        self.coming.clear()

    def _ended(self, engine: Engine) -> None:
        self.ports.release(engine.request.process_key, int(engine.address.rpartition(":")[2]))
        self.world.ended(engine)

    def _supervised(self, changed: Signal) -> ServingSupervisor:
        return ServingSupervisor(self, changed)

    def _hardware(self) -> SimHardware:
        return ServingHardware(self)


class ServingHardware(SimHardware):
    def __init__(self, machine: ServingMachine) -> None:
        self._machine = machine

    def capacity(self, _directory: Path) -> Capacity:
        total = self._machine.memory_bytes
        # A machine never has nothing left: that would be called unknown.
        free = max(1, total - self._machine.used_bytes)
        return Capacity(cores=2, total_ram=total, available_ram=free, total_disk=2**40, available_disk=2**39)
