"""From `enginehouse run tiny-chat --prompt …` to the first byte of its answer, over a script that does it by hand.

Ours is the real command against a running `enginehouse up` on a fresh data directory: on the way the engine is
installed, the model placed and the engine started. Theirs is by_hand/first_token.py: the same packages, the same engine
with the same model on one thread. Both are measured from the start of their process; they take turns, share one warm
package cache, and begin with an empty directory in every round.

    .venv/bin/python bench/first_token.py [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import uv

from enginehouse.core.gallery import find_model, resolve
from enginehouse.fetch.galleries.sources import builtin_directory, load_builtin
from enginehouse.fetch.pypi import uv_environment
from enginehouse.host import hardware

BAR = 2.0
MODEL = "tiny-chat"
QUESTION = "What is the capital of France?"
PROGRAM = str(Path(sys.executable).with_name("enginehouse"))
BY_HAND = str(Path(__file__).parent / "by_hand" / "first_token.py")
LIMIT_SECONDS = 60.0  # a round takes a few seconds; beyond this something hangs


def seconds_by_hand(place: Path) -> float:
    galleries, gallery = (load_builtin(),), Path(str(builtin_directory()))
    model = find_model(galleries, MODEL)
    assert model is not None
    engine = resolve(galleries, model.backend, hardware.capability(), hardware.platform())
    for name, copied in ((engine.launcher, "launcher"), ("startup", "startup")):
        shutil.copy(gallery / "launchers" / f"{name}.py", place / f"{copied}.py")
    (place / "requirements.txt").write_text("\n".join(engine.requirements))
    options = {"context": model.options.context_size, "parallel": model.options.parallel, "threads": 1}
    described = {"name": model.name, "path": str(gallery / model.files[0].name), "key": "by-hand", **options}
    (place / "model.json").write_text(json.dumps(described))
    command = [sys.executable, BY_HAND, str(place), uv.find_uv_bin(), str(free_port()), QUESTION]
    took, said = seconds_to_first_byte(command, uv_environment(os.environ))
    if not said.strip():
        raise SystemExit("by hand there was no token")
    return took


def seconds_through_us(place: Path) -> float:
    cluster = str(place / "cluster")
    with running_house(cluster, place / "up.log"):
        command = [PROGRAM, "--data", cluster, "run", MODEL, "--prompt", QUESTION]
        took, said = seconds_to_first_byte(command, dict(os.environ))
    if b"Paris" not in said:
        raise SystemExit(f"`enginehouse run` did not answer: {said.decode()}")
    return took


def seconds_to_first_byte(command: list[str], environment: dict[str, str]) -> tuple[float, bytes]:
    """From the start of a program to the first byte on its stdout, and all that it said there."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1)
        took = time.perf_counter() - began
        rest, _ = process.communicate(timeout=LIMIT_SECONDS)
    return took, first + rest


@contextlib.contextmanager
def running_house(cluster: str, log: Path) -> Iterator[None]:
    command = [PROGRAM, "up", "--data", cluster, "--name", "bench", "--port", str(free_port())]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while b"Enginehouse is up" not in log.read_bytes():
            if time.monotonic() > deadline:
                raise SystemExit(f"`enginehouse up` did not come up: {log.read_text()}")
            time.sleep(0.02)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT_SECONDS)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description="Time to the first token, over the same by hand.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under 50 s")
    rounds = 7 if parser.parse_args().quick else 21
    ways = {"by hand": seconds_by_hand, "enginehouse run": seconds_through_us}
    times: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(prefix="first-token-") as scratch:
        # Round 0 fills the package cache and is not counted.
        for number in range(rounds + 1):
            for name, measure in ways.items():
                place = Path(tempfile.mkdtemp(dir=scratch))
                took = measure(place)
                if number:
                    times[name].append(took)
    for name, each in times.items():
        print(f"{name:>16}: {statistics.median(each):.3f} s ({rounds} rounds, {min(each):.3f} to {max(each):.3f})")
    ratio = statistics.median(times["enginehouse run"]) / statistics.median(times["by hand"])
    print(f"first_token: {ratio:.2f} (bar {BAR}: time to the first token over that of the same by hand)")
    return 0 if ratio <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
