"""From an image reference to a usable tree, against the usual tools and against the machine.

Ours is the real installer: resolve, fetch, verify, unpack, swap, sync. The bars are for the tree in its place, where
all of it can be read; beside it stands when it was synced too, which the others never do. In turns, on one registry:

* `skopeo copy` + `umoci unpack` (umoci reads no zstd; there it is `skopeo copy` + GNU tar, which is harder to beat);
* download, flatten, apply in sequence, as LocalAI does it (by_hand/in_sequence.py);
* the limits: loopback HTTP, sha256, inflating, and writing the same files.

Then: memory, disk, what a hundred kills cost, what an upgrade of one layer fetches, what two versions take.

    .venv/bin/python bench/pull.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))  # run as a script, only its own directory is there

from bench.by_hand import images, limits  # noqa: E402
from bench.by_hand.counting import CountingProxy  # noqa: E402
from bench.by_hand.registry import running_registry  # noqa: E402

from enginehouse.artifact.blobs.partial import PART_BYTES  # noqa: E402

BAR_TOOLS, BAR_SEQUENCE = 0.6, 0.4
BAR_MEMORY_BYTES = 150_000_000
BAR_SHARED, BAR_COPIED = 1.25, 2.05
ONCE = [sys.executable, str(Path(__file__).parent / "by_hand" / "pull_once.py")]
SEQUENCE = [sys.executable, str(Path(__file__).parent / "by_hand" / "in_sequence.py")]
LIMIT_SECONDS = 600.0
HOST = "127.0.0.1"
# A disk decides by its own history: for minutes after many files were removed, ext4 takes several times as long to make
# new ones. In memory what the programs do is measured; --directory measures a disk.
MEMORY = Path("/dev/shm")
MIB = 1024 * 1024


class Bench:
    def __init__(self, place: Path, registry: str, quick: bool) -> None:
        self.place = place
        self.registry = registry
        self.quick = quick
        self.faults: list[str] = []
        self._count = 0

    def fresh(self) -> Path:
        """A new directory; the one before is removed where that is free, else it stays until the end."""
        if self.place.parent != MEMORY:
            os.sync()  # nobody waits for what the one before has left to write
        else:
            shutil.rmtree(self.place / f"run-{self._count}", ignore_errors=True)
        self._count += 1
        path = self.place / f"run-{self._count}"
        path.mkdir()
        return path

    def demand(self, what: str, value: float, bar: float, shown: str) -> None:
        holds = value <= bar
        print(f"  {what}: {shown}{'' if holds else '   MISSED'}")
        if not holds:
            self.faults.append(what)

    def push(self, image: images.Image, name: str) -> str:
        images.push(image, f"{self.registry}/{name}")
        return f"{self.registry}/{name}"


def variant(bench: Bench, name: str, image: images.Image, rounds: int) -> tuple[float, float]:
    """The ratios of the medians: ours over the tools, ours over the sequence."""
    reference = bench.push(image, f"pull:{name}")
    ours, synced, tools, sequence = list[float](), list[float](), list[float](), list[float]()
    peak_memory = peak_disk = on_disk = 0
    tree = sum(layer.plain_bytes for layer in image.layers)
    for _ in range(rounds):
        backends = bench.fresh()
        with DiskPeak(bench.place) as used:
            result = pull(reference, backends)
        on_disk = limits.disk_bytes(backends)
        peak_disk = max(peak_disk, used.peak_bytes)
        peak_memory = max(peak_memory, int(result["peak_bytes"]))
        ours.append(result["seconds"])
        synced.append(result["synced_seconds"])
        tools.append(timed(lambda: by_tools(reference, bench.fresh(), name)))
        sequence.append(in_sequence(reference, image, bench.fresh()))
    mine, lasting, theirs, theirs_too = map(statistics.median, (ours, synced, tools, sequence))
    slowest = limits.slowest(image, f"http://{bench.registry}/v2/pull", bench.fresh())
    print(
        f"{name}: {tree // MIB} MiB in {len(image.layers)} layers, {image.size_bytes // MIB} MiB compressed: "
        f"ours {mine:.2f} s (synced {lasting:.2f} s), tools {theirs:.2f} s ({mine / theirs:.2f}x), "
        f"sequence {theirs_too:.2f} s ({mine / theirs_too:.2f}x)"
    )
    print(f"  slowest limit: {slowest[0]} {slowest[1]:.2f} s, ours takes {mine / slowest[1]:.1f}x of it")
    bench.demand(f"{name} memory", peak_memory, BAR_MEMORY_BYTES, f"peak {peak_memory / 1e6:.0f} MB (bar 150)")
    # What is there in the end is the tree and the compressed layers; 2 % is the file system's own bookkeeping.
    shown = f"peak {peak_disk // MIB} MiB (bar: tree and layers, {on_disk // MIB} MiB, + 2 %)"
    bench.demand(f"{name} disk", peak_disk, 1.02 * on_disk, shown)
    return mine / theirs, mine / theirs_too


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def pull(reference: str, backends: Path, *sharing: str) -> dict[str, Any]:
    ended = subprocess.run(
        [*ONCE, reference, str(backends), HOST, *sharing],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    if ended.returncode:
        raise SystemExit(f"the install failed: {ended.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


def by_tools(reference: str, place: Path, name: str) -> None:
    layout = place / "layout"
    run(
        "skopeo",
        "--insecure-policy",
        "copy",
        "-q",
        "--src-tls-verify=false",
        f"docker://{reference}",
        f"oci:{layout}:latest",
    )
    if "zstd" not in name:
        run("umoci", "unpack", "--rootless", "--image", f"{layout}:latest", str(place / "bundle"))
        return
    (place / "tree").mkdir()
    index = json.loads((layout / "index.json").read_text())
    blobs = layout / "blobs" / "sha256"
    manifest = json.loads((blobs / index["manifests"][0]["digest"][7:]).read_text())
    for layer in manifest["layers"]:
        run("tar", "-x", "--zstd", "-f", str(blobs / layer["digest"][7:]), "-C", str(place / "tree"))


def in_sequence(reference: str, image: images.Image, place: Path) -> float:
    registry, _, rest = reference.partition("/")
    layers = [f"{layer.digest[7:]}:{layer.compression}" for layer in image.layers]
    ended = subprocess.run(
        [*SEQUENCE, registry, rest.partition(":")[0], str(place), *layers],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=True,
    )
    return float(ended.stdout)


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=LIMIT_SECONDS, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class DiskPeak:
    """The most that the file system filled up by while inside. Nothing else should write there meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.peak_bytes = 0

    def __enter__(self) -> DiskPeak:
        self._before = self._used()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(0.02):
            self.peak_bytes = max(self.peak_bytes, self._used() - self._before)

    def _used(self) -> int:
        status = os.statvfs(self._path)
        return (status.f_blocks - status.f_bfree) * status.f_frsize


def kills(bench: Bench, count: int) -> None:
    """Killed at random moments again and again, one install takes little more than one image from the registry."""
    files = images.choose_files((32 if bench.quick else 128) * MIB, 3)
    image = images.write_image(bench.place / "kills", images.split(files, 5), "zstd")
    bench.push(image, "kills:latest")
    proxy = CountingProxy(bench.registry)
    reference = f"{proxy.address}/kills:latest"
    # Moments while it works: a little less than a whole run after its start-up.
    start = time.perf_counter()
    pull(f"{bench.registry}/kills:latest", bench.fresh())
    whole = time.perf_counter() - start
    backends = bench.fresh()
    chance = random.Random(4)
    for _ in range(count):
        process = subprocess.Popen(
            [*ONCE, reference, str(backends), HOST], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(chance.uniform(0.4, 0.95) * whole)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        else:
            shutil.rmtree(backends / "engine", ignore_errors=True)  # it was quicker than the kill: once more
    pull(reference, backends)
    proxy.close()
    allowed = image.size_bytes + count * PART_BYTES
    bench.demand(
        "kills",
        proxy.sent_bytes,
        allowed,
        f"{count} kills: {proxy.sent_bytes / image.size_bytes:.2f}x the image taken from the registry "
        f"(bar {allowed / image.size_bytes:.2f}x: the image and {PART_BYTES // MIB} MiB per kill)",
    )


def upgrades(bench: Bench, total_bytes: int) -> None:
    """One layer of five is another one: what is fetched, and what two versions take that share most of their files."""
    files = images.choose_files(total_bytes, 7)
    parts = images.split(files, 5)
    first = images.write_image(bench.place / "first", parts, "gzip")
    second = images.with_another_end(bench.place / "second", first, images.rebuilt(parts[4]))
    for mode in ("", "copy"):
        reference, backends = bench.push(first, "upgrade:latest"), bench.fresh()
        pull(reference, backends, mode)
        one = limits.disk_bytes(backends / "engine")
        bench.push(second, "upgrade:latest")
        used = occupied(backends)
        done = pull(reference, backends, mode)
        fetched, layer = done["fetched_bytes"], second.layers[4].size_bytes
        bench.demand("one layer of five", fetched, 1.01 * layer, f"{fetched / layer:.3f}x of that layer (bar 1.01)")
        # A file system that clones counts the blocks of a clone as its own: only what is free tells.
        both = limits.disk_bytes(backends / "engine", backends / ".enginehouse" / "previous" / "engine")
        both = one + occupied(backends) - used if done["sharing"] == "reflink" else both
        bar = BAR_COPIED if done["sharing"] == "copy" else BAR_SHARED
        told = (
            f"by {done['sharing']}: {both / one:.2f}x of one (bar {bar}), synced after {done['synced_seconds']:.2f} s"
        )
        bench.demand("two versions", both / one, bar, told)


def occupied(backends: Path) -> int:
    """Of the file system, without what is kept of the image itself."""
    os.sync()
    status = os.statvfs(backends)
    kept = limits.disk_bytes(backends / ".enginehouse" / "blobs")
    return (status.f_blocks - status.f_bfree) * status.f_frsize - kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="128 MiB, two variants, three rounds")
    parser.add_argument("--directory", type=Path, help="where to work (default: in memory, else this checkout)")
    options = parser.parse_args()
    directory = options.directory or (MEMORY if has_room(MEMORY, options.quick) else CHECKOUT)
    print(f"in {'memory' if directory == MEMORY else directory}, which every contender uses")
    place = Path(tempfile.mkdtemp(prefix=".bench-", dir=directory))
    try:
        with running_registry(place / "registry") as registry:
            return measure(Bench(place, registry, options.quick))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def has_room(path: Path, quick: bool) -> bool:
    try:
        status = os.statvfs(path)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize > (3 if quick else 12) * 1024 * MIB


def measure(bench: Bench) -> int:
    total, rounds = (128 * MIB, 3) if bench.quick else (1024 * MIB, 5)
    # Headers and padding of the tars are part of the size.
    files = images.choose_files(total * 94 // 100, 1)
    shapes = (
        [("gzip-5", 5), ("zstd-1", 1)] if bench.quick else [("gzip-5", 5), ("gzip-1", 1), ("zstd-5", 5), ("zstd-1", 1)]
    )
    ratios: list[tuple[float, float]] = []
    for name, count in shapes:
        image = images.write_image(bench.place / name, images.split(files, count), name.partition("-")[0])
        ratios.append(variant(bench, name, image, rounds))
    kills(bench, 2 if bench.quick else 100)
    upgrades(bench, total // 10)
    tools, sequence = (math.exp(statistics.mean(math.log(pair[which]) for pair in ratios)) for which in (0, 1))
    bench.demand(
        "sequence", sequence, BAR_SEQUENCE, f"{sequence:.2f}x of download, flatten, apply (bar {BAR_SEQUENCE})"
    )
    if tools > BAR_TOOLS:
        bench.faults.append("tools")
    if bench.faults:
        print(f"missed: {', '.join(bench.faults)}")
    print(f"pull: {tools:.2f} (bar {BAR_TOOLS} of skopeo + umoci; sequence {sequence:.2f}, bar {BAR_SEQUENCE})")
    return 1 if bench.faults else 0


if __name__ == "__main__":
    sys.exit(main())
