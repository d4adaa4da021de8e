"""The simulation notices: for every guarantee there is a deliberate fault of the code, and it is caught as that."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from tests.sim.mutants import MUTANTS, SEEDS
from tests.sim.pool import catch_mutant, open_pool
from tests.sim.run import Result

GUARANTEES = {"G1", "G2", "G3", "G4", "G5", "G9"}
Caught = dict[str, Future[Result | None]]


@pytest.fixture(scope="module")
def caught() -> Iterator[Caught]:
    with open_pool() as pool:
        yield {mutant.name: pool.submit(catch_mutant, mutant.name) for mutant in MUTANTS}


def test_every_guarantee_has_a_mutant() -> None:
    assert {guarantee for mutant in MUTANTS for guarantee in mutant.guarantees} >= GUARANTEES


@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS])
def test_a_mutant_is_caught(caught: Caught, name: str) -> None:
    mutant = next(one for one in MUTANTS if one.name == name)
    result = caught[name].result(timeout=300)
    assert result is not None, f"nobody noticed within {SEEDS} seeds that {name}"
    assert result.guarantee in mutant.guarantees, result.violation
