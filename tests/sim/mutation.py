"""What a mutant is: a small deliberate fault in the real code, and the circumstances in which it must be noticed.

A mutant patches functions or methods of the product while it lasts, and names the guarantees that are broken by it. Its
weather and its script make the moment likely in which it shows; without the fault the same run must hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from random import Random

import msgspec
from msgspec import Struct
from tests.sim.options import Fault, Options, SimRequest, expand

SEEDS = 60  # within which every mutant must be caught
Patch = tuple[object, str, object]
Script = Callable[[Random], tuple[SimRequest, ...]]


class Mutant(Struct, frozen=True):
    name: str
    guarantees: tuple[str, ...]  # any of them may be the first to notice
    make: Callable[[], list[Patch]]
    weather: dict[str, float] = {}  # options that are so on every seed
    script: Script | None = None  # what people request instead of the seed's own requests
    faults: tuple[Fault, ...] | None = None

    def options(self, seed: int) -> Options:
        options = msgspec.structs.replace(expand(seed), **self.weather)
        if self.script is not None:
            options = msgspec.structs.replace(options, requests=self.script(Random(seed)))
        return options if self.faults is None else msgspec.structs.replace(options, faults=self.faults)


@contextlib.contextmanager
def in_place(make: Callable[[], list[Patch]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, value in make():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
