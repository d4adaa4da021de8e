"""`python -m tests.sim`: run one seed or many, show what happened, and make a failing run smaller.

--seed N             one run
--seed N --shrink    the same, made smaller as long as the same guarantee fails
--options FILE       one run from options as they were printed
--seeds FROM:TO      many, over all cores, until one fails
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import msgspec
from tests.sim.options import Options, expand
from tests.sim.pool import HASH_SEED, described, open_pool, results_of
from tests.sim.run import run
from tests.sim.shrink import shrink


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", metavar="FROM:TO", default="0:2000")
    parser.add_argument("--options", type=Path)
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--keep-going", action="store_true", help="past the first failure, one line each")
    arguments = parser.parse_args()
    if arguments.options is not None:
        return one(msgspec.json.decode(arguments.options.read_bytes(), type=Options), arguments.shrink)
    if arguments.seed is not None:
        return one(expand(arguments.seed), arguments.shrink)
    first, last = (int(part) for part in arguments.seeds.split(":"))
    return many(range(first, last), arguments.keep_going)


def one(options: Options, is_shrunk: bool) -> int:
    result = run(options)
    if not result.violation:
        print(
            f"seed {result.seed}: every guarantee held "
            f"({result.steps} steps, {result.virtual_seconds:.1f} virtual seconds, trace {result.digest})"
        )
        return 0
    if is_shrunk:
        options, result = shrink(options, result.guarantee, lambda line: print(line, file=sys.stderr))
    print(described(result, options))
    return 1


def many(seeds: range, keeps_going: bool) -> int:
    began, done, failed, virtual = time.monotonic(), 0, 0, 0.0
    with open_pool() as pool:
        for results in results_of(pool, seeds):
            done += len(results)
            virtual += sum(result.virtual_seconds for result in results)
            bad = [result for result in results if result.violation]
            failed += len(bad)
            for result in bad:
                if not keeps_going:
                    pool.shutdown(wait=False, cancel_futures=True)
                    print(described(result))
                    return 1
                print(f"seed {result.seed}: {result.violation.splitlines()[0]}", flush=True)
            print(f"{done} of {len(seeds)} in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(f"seeds {seeds.start}:{seeds.stop}: {failed} failed, {virtual / 3600:.1f} virtual hours")
    return 1 if failed else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.sim", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": HASH_SEED},
        )
    sys.exit(main())
