"""`python -m tests.sim`: run one seed, or many, and show what happened."""

from __future__ import annotations

import argparse
import os
import sys
import time

import msgspec
from tests.sim.options import expand
from tests.sim.run import Result, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", metavar="FROM:TO")
    parser.add_argument("--keep-going", action="store_true")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return report(run(expand(arguments.seed)))
    first, last = (int(part) for part in (arguments.seeds or "0:100").split(":"))
    began, failed = time.process_time(), 0
    for seed in range(first, last):
        result = run(expand(seed))
        if result.violation:
            failed += 1
            if not arguments.keep_going:
                return report(result)
            print(f"seed {seed}: {result.violation.splitlines()[0][:200]}")
    took = time.process_time() - began
    print(f"seeds {first} to {last}: {failed} failed, {1000 * took / (last - first):.0f} ms each")
    return 1 if failed else 0


def report(result: Result) -> int:
    if not result.violation:
        print(f"seed {result.seed}: every guarantee held ({result.steps} steps, {result.virtual_seconds:.1f} s, {result.digest})")
        return 0
    print(f"seed {result.seed} failed: {result.violation}\n")
    print(msgspec.json.format(msgspec.json.encode(expand(result.seed)), indent=2).decode())
    print("\nthe last steps (virtual time, who, what):")
    print("\n".join(result.lines))
    print(f"\nseed {result.seed} failed: {result.violation}")
    print(f"again: .venv/bin/python -m tests.sim --seed {result.seed}")
    return 1


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets is chance as well, and must be that of the seed.
        os.execve(sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
