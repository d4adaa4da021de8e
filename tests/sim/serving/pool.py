"""Many runs about serving over all cores, in fresh processes, as the other runs are."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed

import msgspec
from tests.sim.run import Result
from tests.sim.serving.options import ServingOptions, expand_serving
from tests.sim.serving.run import run_serving

CHUNK = 10  # seeds per task: a few seconds


def run_serving_seeds(seeds: Sequence[int]) -> list[Result]:
    """In a child."""
    gc.freeze()
    return [run_serving(expand_serving(seed)) for seed in seeds]


def serving_results_of(pool: ProcessPoolExecutor, seeds: Sequence[int]) -> Iterator[list[Result]]:
    """Chunk by chunk, as they end."""
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    waiting: list[Future[list[Result]]] = [pool.submit(run_serving_seeds, chunk) for chunk in chunks]
    for done in as_completed(waiting):
        yield done.result()


def described_serving(result: Result, options: ServingOptions | None = None) -> str:
    """Everything that somebody needs to understand a failure, and to see it again."""
    whole = expand_serving(result.seed)
    again = f"again: .venv/bin/python -m tests.sim.serving --seed {result.seed} (and --shrink for a smaller one)"
    if options not in (None, whole):
        again = "again: .venv/bin/python -m tests.sim.serving --options FILE, with the options above in FILE"
    shown = msgspec.json.format(msgspec.json.encode(options or whole), indent=2).decode()
    lines = "\n".join(result.lines)
    return (
        f"seed {result.seed}: {result.violation}\n\noptions: {shown}\n\n"
        f"the last steps (virtual time, who, what):\n{lines}\n\n"
        f"seed {result.seed}: {result.violation}\n"
        f"{again}"
    )
