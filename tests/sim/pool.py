"""Many seeds over all cores, in fresh processes: a run must not depend on what ran before it, nor on the order of sets.

The children get a fixed hash seed, because the order in which a set of words is walked is chance as well.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed

import msgspec
from msgspec import Struct
from tests.sim.mutants import MUTANTS
from tests.sim.mutation import SEEDS, in_place
from tests.sim.options import Options, expand
from tests.sim.run import Result, run
from tests.sim.store import database

CHUNK = 25  # seeds per task: a few seconds, so that no core waits long for another at the end
HASH_SEED = "0"


@contextlib.contextmanager
def open_pool() -> Iterator[ProcessPoolExecutor]:
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = HASH_SEED
    try:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(os.cpu_count() or 1, mp_context=context) as pool:
            yield pool
    finally:
        if before is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = before


def run_seeds(seeds: Sequence[int]) -> list[Result]:
    """In a child."""
    gc.freeze()  # the program itself: looking through it again and again costs more than what a run leaves
    return [run(expand(seed)) for seed in seeds]


def run_on_library(seeds: Sequence[int]) -> list[Result]:
    """The same without the shortcut. In a child."""
    source = database()
    shortcut, source.held = source.held, source.library
    try:
        return run_seeds(seeds)
    finally:
        source.held = shortcut


class Caught(Struct, frozen=True):
    """The first run on which a mutant was noticed, and what the same run is without it."""

    with_it: Result
    without_it: Result


def catch_mutant(name: str) -> Caught | None:
    """In a child."""
    gc.freeze()
    mutant = next(one for one in MUTANTS if one.name == name)
    caught: Caught | None = None
    for seed in range(SEEDS):
        with in_place(mutant.make):
            result = run(mutant.options(seed))
        if result.violation:
            caught = Caught(result, run(mutant.options(seed)))
            break
    return caught


def results_of(pool: ProcessPoolExecutor, seeds: Sequence[int]) -> Iterator[list[Result]]:
    """Chunk by chunk, as they end."""
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    waiting: list[Future[list[Result]]] = [pool.submit(run_seeds, chunk) for chunk in chunks]
    for done in as_completed(waiting):
        yield done.result()


def described(result: Result, options: Options | None = None) -> str:
    """Everything that somebody needs to understand a failure, and to see it again."""
    whole = expand(result.seed)
    again = f"again: .venv/bin/python -m tests.sim --seed {result.seed} (and --shrink for a smaller one)"
    if options not in (None, whole):
        again = "again: .venv/bin/python -m tests.sim --options FILE, with the options above in FILE"
    shown = msgspec.json.format(msgspec.json.encode(options or whole), indent=2).decode()
    lines = "\n".join(result.lines)
    return (
        f"seed {result.seed}: {result.violation}\n\noptions: {shown}\n\n"
        f"the last steps (virtual time, who, what):\n{lines}\n\n"
        f"seed {result.seed}: {result.violation}\n"
        f"{again}"
    )
