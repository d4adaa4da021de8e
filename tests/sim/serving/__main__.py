"""`python -m tests.sim.serving`: run one seed about serving or many, and make a failing run smaller.

--seed N             one run
--seed N --shrink    the same, made smaller as long as the same guarantee fails
--options FILE       one run from options as they were printed
--seeds FROM:TO      many, over all cores, one line for each that fails
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import msgspec
from tests.sim.pool import HASH_SEED, open_pool
from tests.sim.serving.options import ServingOptions, expand_serving
from tests.sim.serving.pool import described_serving, serving_results_of
from tests.sim.serving.run import run_serving
from tests.sim.serving.shrink import shrink_serving


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", metavar="FROM:TO", default="0:200")
    parser.add_argument("--options", type=Path)
    parser.add_argument("--shrink", action="store_true")
    arguments = parser.parse_args()
    if arguments.options is not None:
        return one(msgspec.json.decode(arguments.options.read_bytes(), type=ServingOptions), arguments.shrink)
    if arguments.seed is not None:
        return one(expand_serving(arguments.seed), arguments.shrink)
    first, last = (int(part) for part in arguments.seeds.split(":"))
    return many(range(first, last))


def one(options: ServingOptions, is_shrunk: bool) -> int:
    result = run_serving(options)
    if not result.violation:
        print(f"seed {result.seed}: every guarantee held ({result.steps} steps, {result.virtual_seconds:.1f} s)")
        return 0
    if is_shrunk:
        options, result = shrink_serving(options, result.guarantee, lambda line: print(line, file=sys.stderr))
    print(described_serving(result, options))
    return 1


def many(seeds: range) -> int:
    failed = 0
    with open_pool() as pool:
        for results in serving_results_of(pool, seeds):
            for result in results:
                if result.violation:
                    failed += 1
                    print(f"seed {result.seed}: {result.violation.splitlines()[0]}", flush=True)
    print(f"seeds {seeds.start}:{seeds.stop}: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.sim.serving", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": HASH_SEED},
        )
    sys.exit(main())
