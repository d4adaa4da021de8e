"""The deterministic simulation: every guarantee holds on every seed, and one seed is one run.

`ENGINEHOUSE_SEEDS` says how many seeds (2,000 where it says nothing), `ENGINEHOUSE_FIRST_SEED` where to begin.
Seeds of bugs that were fixed run first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from tests.sim.mutants import MUTANTS
from tests.sim.options import Options, expand
from tests.sim.pool import described, open_pool, results_of, run_on_library, run_seeds
from tests.sim.run import Result, run

SEEDS = int(os.environ.get("ENGINEHOUSE_SEEDS", "2000"))
FIRST = int(os.environ.get("ENGINEHOUSE_FIRST_SEED", "0"))
PARTS = 8  # so that one knows how far it is, and which part failed
OFTEN = 0.15  # a quarter of the runs is aimed at
FEW = 100  # of fewer seeds chance alone may have less


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with open_pool() as opened:
        yield opened


def regressions() -> list[Options]:
    lines = (Path(__file__).parent / "regressions.txt").read_text().splitlines()
    told = [line.split("|") for line in lines if line.strip() and not line.startswith("#")]
    by_name = {mutant.name: mutant.options for mutant in MUTANTS}
    return [by_name.get(name.strip(), expand)(int(seed)) for seed, name, _ in told]


def check(pool: ProcessPoolExecutor, seeds: list[int]) -> list[Result]:
    every: list[Result] = []
    for results in results_of(pool, seeds):
        every += results
        for result in results:
            if result.violation:
                pool.shutdown(wait=False, cancel_futures=True)
                pytest.fail(described(result), pytrace=False)
    return every


def test_no_fixed_bug_is_back(pool: ProcessPoolExecutor) -> None:
    known = regressions()
    assert len(known) >= 5
    for options, result in zip(known, pool.map(run, known), strict=True):
        if result.violation:
            pytest.fail(described(result, options), pytrace=False)


def test_the_same_seed_is_the_same_run(pool: ProcessPoolExecutor) -> None:
    # Different neighbours before them, and likely different processes.
    first = pool.submit(run_seeds, [3, 1, 4, 15, 9])
    second = pool.submit(run_seeds, [26, 9, 15, 4, 1])
    one = {result.seed: result.digest for result in first.result()}
    other = {result.seed: result.digest for result in second.result()}
    assert {seed: one[seed] for seed in (1, 4, 15, 9)} == {seed: other[seed] for seed in (1, 4, 15, 9)}


def test_the_shortcut_past_the_library_changes_nothing(pool: ProcessPoolExecutor) -> None:
    seeds = list(range(100, 125))
    short, whole = pool.submit(run_seeds, seeds), pool.submit(run_on_library, seeds)
    assert [result.digest for result in short.result()] == [result.digest for result in whole.result()]


@pytest.mark.parametrize("part", range(PARTS))
def test_every_guarantee_holds(pool: ProcessPoolExecutor, part: int) -> None:
    size = -(-SEEDS // PARTS)
    seeds = list(range(FIRST + part * size, min(FIRST + SEEDS, FIRST + (part + 1) * size)))
    if seeds:
        print(f"seeds {seeds[0]}:{seeds[-1] + 1}")
    results = check(pool, seeds)
    assert len(results) == len(seeds)
    if len(seeds) >= FEW:
        taken_over = sum(result.take_overs > 0 for result in results)
        assert taken_over >= OFTEN * len(seeds), f"only {taken_over} of {len(seeds)} runs have a take-over"
