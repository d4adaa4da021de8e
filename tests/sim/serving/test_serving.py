"""The simulation of serving: every guarantee holds on every seed, one seed is one run, and every mutant is noticed.

`ENGINEHOUSE_SEEDS` says how many seeds, one here for each 25 there (80 where it says nothing); a run about serving is
longer than another. Seeds of bugs that were fixed run first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import pytest
from tests.sim.pool import open_pool
from tests.sim.run import Result
from tests.sim.serving.mutants import SEEDS, SERVING_MUTANTS, CaughtServing, catch_serving_mutant
from tests.sim.serving.pool import described_serving, run_serving_seeds, serving_results_of

NUMBER = max(1, int(os.environ.get("ENGINEHOUSE_SEEDS", "2000")) // 25)
FIRST = int(os.environ.get("ENGINEHOUSE_FIRST_SEED", "0"))
GUARANTEES = {"G12", "G13", "G14", "G16", "G20", "answers", "capacity", "drained", "flapping", "wanted"}
AllCaught = dict[str, Future[CaughtServing | None]]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with open_pool() as opened:
        yield opened


@pytest.fixture(scope="module")
def caught(pool: ProcessPoolExecutor) -> AllCaught:
    return {mutant.name: pool.submit(catch_serving_mutant, mutant.name) for mutant in SERVING_MUTANTS}


def check(results: list[Result]) -> None:
    for result in results:
        if result.violation:
            pytest.fail(described_serving(result), pytrace=False)


def test_no_fixed_bug_of_serving_is_back(pool: ProcessPoolExecutor) -> None:
    lines = (Path(__file__).parent / "regressions.txt").read_text().splitlines()
    seeds = [int(line.split("|")[0]) for line in lines if line.strip() and not line.startswith("#")]
    assert len(seeds) >= 5
    for results in serving_results_of(pool, seeds):
        check(results)


def test_the_same_seed_of_serving_is_the_same_run(pool: ProcessPoolExecutor) -> None:
    # Different neighbours before them, and likely different processes.
    first, second = pool.submit(run_serving_seeds, [3, 1, 4]), pool.submit(run_serving_seeds, [9, 4, 1])
    one = {result.seed: result.digest for result in first.result()}
    other = {result.seed: result.digest for result in second.result()}
    assert {seed: one[seed] for seed in (1, 4)} == {seed: other[seed] for seed in (1, 4)}


def test_every_guarantee_of_serving_holds(pool: ProcessPoolExecutor) -> None:
    seeds = range(FIRST, FIRST + NUMBER)
    done = 0
    for results in serving_results_of(pool, seeds):
        check(results)
        done += len(results)
    assert done == len(seeds)


def test_every_guarantee_of_serving_has_a_mutant() -> None:
    assert {guarantee for mutant in SERVING_MUTANTS for guarantee in mutant.guarantees} >= GUARANTEES


@pytest.mark.parametrize("name", [mutant.name for mutant in SERVING_MUTANTS])
def test_a_mutant_of_serving_is_caught(caught: AllCaught, name: str) -> None:
    mutant = next(one for one in SERVING_MUTANTS if one.name == name)
    found = caught[name].result(timeout=300)
    assert found is not None, f"nobody noticed within {SEEDS} seeds that {name}"
    assert found.with_it.guarantee in mutant.guarantees, found.with_it.violation
    assert not found.without_it.violation, f"not for the fault: {found.without_it.violation}"
