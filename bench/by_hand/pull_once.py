"""One install in a process of its own, for bench/pull.py: prints what it took as one line of JSON.

    pull_once.py REFERENCE BACKENDS_PATH ALLOWED_HOST

Time counts from the reference to the tree in its place, synced; a worker that installs is running already, so the
start of the interpreter does not count. Memory is the peak of the whole process.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

import uvloop

from enginehouse.core.backend import Resolved
from enginehouse.worker.assembly import InstallerOptions
from enginehouse.worker.install import InstallWish
from enginehouse.worker.local import Local


async def main(reference: str, backends: str, host: str) -> None:
    options = InstallerOptions(backends=Path(backends), allowed_hosts=(host,))
    async with Local(options, os.environ, doing="measure") as local:
        wish = InstallWish(resolved=Resolved(directory="engine", uri=reference, digest=""), upgrade=True)
        start = time.perf_counter()
        installed = await local.install(wish, lambda *_: None)
        took = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures = {"seconds": took, "peak_bytes": peak, "fetched_bytes": installed.fetched_bytes}
    print(json.dumps({**figures, "shared_bytes": installed.shared_bytes}))


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
