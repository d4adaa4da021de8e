"""One install in a process of its own, for bench/pull.py: prints what it took as one line of JSON.

    pull_once.py REFERENCE BACKENDS_PATH ALLOWED_HOST [copy]

Time counts from the reference to the tree in its place, complete and checked, and beside that to the end, when the disk
has it. A worker that installs is running already, so the start of the interpreter does not count. Memory is the peak of
the whole process.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

import uvloop

from enginehouse.build_worker import make_installation
from enginehouse.core.backend import Resolved
from enginehouse.host import confinement
from enginehouse.host.blocking import in_thread
from enginehouse.worker.backends.installation import InstallerOptions, lock_backends
from enginehouse.worker.backends.installer import InstallRequest


async def main(reference: str, backends: str, host: str, sharing: str = "") -> None:
    # As a worker here: hard links where engines are confined. `copy` measures a worker whose engines are not.
    may_link = sharing != "copy" and confinement.choose("auto", "").protects_trees
    options = InstallerOptions(backends=Path(backends), allowed_hosts=(host,), may_link=may_link)
    held, assembled = lock_backends(options.backends, "measure"), make_installation(options, os.environ)
    await in_thread(assembled.installer.recover)
    request = InstallRequest(resolved=Resolved(directory="engine", uri=reference, digest=""), upgrade=True)
    usable: list[float] = []

    async def swapped() -> None:
        usable.append(time.perf_counter() - start)

    start = time.perf_counter()
    installed = await assembled.installer.install(request, lambda *_: None, swapped)
    synced = time.perf_counter() - start
    await assembled.close()
    held.release()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures = {"seconds": usable[0] if usable else synced, "synced_seconds": synced, "peak_bytes": peak}
    figures |= {"fetched_bytes": installed.fetched_bytes, "shared_bytes": installed.shared_bytes}
    print(json.dumps({**figures, "sharing": installed.sharing}))


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
