"""The simulation notices: for every guarantee there is a deliberate fault of the code, and it is caught as that."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from tests.sim.mutants import MUTANTS
from tests.sim.mutation import SEEDS
from tests.sim.pool import Caught, catch_mutant, open_pool

GUARANTEES = {"G1", "G2", "G3", "G4", "G5", "G6", "G9", "G10", "G13", "G19", "G25", "end", "lanes"}
AllCaught = dict[str, Future[Caught | None]]


@pytest.fixture(scope="module")
def caught() -> Iterator[AllCaught]:
    with open_pool() as pool:
        yield {mutant.name: pool.submit(catch_mutant, mutant.name) for mutant in MUTANTS}


def test_every_guarantee_has_a_mutant() -> None:
    assert {guarantee for mutant in MUTANTS for guarantee in mutant.guarantees} >= GUARANTEES


@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS])
def test_a_mutant_is_caught(caught: AllCaught, name: str) -> None:
    mutant = next(one for one in MUTANTS if one.name == name)
    found = caught[name].result(timeout=300)
    assert found is not None, f"nobody noticed within {SEEDS} seeds that {name}"
    assert found.with_it.guarantee in mutant.guarantees, found.with_it.violation
    assert not found.without_it.violation, f"not for the fault: {found.without_it.violation}"
