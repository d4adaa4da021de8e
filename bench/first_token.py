"""From `enginehouse run tiny-chat --prompt …` to the first byte of the answer, over the same by hand.

Ours: the real command against a running `enginehouse up` on a fresh data directory, so the engine is installed, the
model placed and the engine started on the way. Theirs: `by_hand`, ten lines that make the same environment, start the
same engine with the same model on one thread and ask it. Both take turns, share one warm package cache, and start from
nothing in every round. `by_hand` runs in this process, so it pays for no interpreter of its own: in its favour.

    .venv/bin/python bench/first_token.py [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uv

from enginehouse.core.backend import Resolved
from enginehouse.core.gallery import find_model, resolve
from enginehouse.core.model import Model
from enginehouse.fetch.galleries import builtin_directory, load_builtin
from enginehouse.fetch.pypi import uv_environment
from enginehouse.host import hardware

BAR = 2.0
QUESTION = "What is the capital of France?"
PROGRAM = str(Path(sys.executable).with_name("enginehouse"))
LIMIT_SECONDS = 60.0  # a round takes two; beyond this something hangs
KEY = "by-hand"


def by_hand(place: Path, engine: Resolved, model: Model) -> float:
    """Seconds to the first token without us."""
    began = time.perf_counter()
    gallery, port = Path(str(builtin_directory())), free_port()
    (place / "requirements.txt").write_text("\n".join(engine.requirements))
    options = {"name": model.name, "context": model.options.context_size, "parallel": model.options.parallel}
    described = {"path": str(gallery / model.files[0].name), "threads": 1, "key": KEY, **options}
    (place / "model.json").write_text(json.dumps(described))
    python, install = str(place / "venv/bin/python"), [uv.find_uv_bin(), "--quiet"]
    same = {"cwd": place, "env": uv_environment(os.environ), "check": True}
    subprocess.run([*install, "venv", "--python", sys.executable, "venv"], **same)
    wanted = ("--no-deps", "--require-hashes", "-r", "requirements.txt")
    subprocess.run([*install, "pip", "install", "--python", python, *wanted], **same)
    argv = [python, "-I", str(gallery / "launchers" / f"{engine.launcher}.py"), "--addr", f"127.0.0.1:{port}"]
    environment = {**os.environ, "ENGINEHOUSE_MODEL_FILE": str(place / "model.json")}
    with (place / "engine.log").open("wb") as log, running(argv, log.fileno(), environment):
        wait_until(lambda: answers(port), "the engine to answer")
        first_token(port, model.name)
        return time.perf_counter() - began


def first_token(port: int, model: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_SECONDS)
    messages = [{"role": "user", "content": QUESTION}]
    body = json.dumps({"model": model, "messages": messages, "stream": True, "temperature": 0})
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    answer = connection.getresponse()
    for line in answer:
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
            connection.close()
            return
    raise SystemExit(f"the engine by hand gave no token (status {answer.status})")


def answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def through_us(place: Path, model: Model) -> float:
    """Seconds from the start of the command to the first byte of its answer."""
    argv = [PROGRAM, "up", "--data", str(place / "house"), "--name", "bench", "--port", str(free_port())]
    log = place / "up.log"
    with log.open("wb") as output, running(argv, output.fileno(), dict(os.environ)):
        wait_until(lambda: b"Enginehouse is up" in log.read_bytes(), "`enginehouse up` to be up")
        command = [PROGRAM, "--data", str(place / "house"), "run", model.name, "--prompt", QUESTION]
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asking:
            assert asking.stdout is not None
            first = os.read(asking.stdout.fileno(), 1)
            took = time.perf_counter() - began
            rest, told = asking.communicate(timeout=LIMIT_SECONDS)
    if b"Paris" not in first + rest:
        raise SystemExit(f"`enginehouse run` did not answer: {(first + rest + told).decode()}")
    return took


@contextlib.contextmanager
def running(argv: list[str], output: int, environment: dict[str, str]) -> Iterator[None]:
    process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT_SECONDS)


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {LIMIT_SECONDS:.0f} s in vain for {what}")
        time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under 50 s")
    rounds = 5 if parser.parse_args().quick else 15
    galleries = (load_builtin(),)
    model = find_model(galleries, "tiny-chat")
    assert model is not None
    engine = resolve(galleries, model.backend, hardware.capability(), hardware.platform())
    ours, theirs = [], []
    with tempfile.TemporaryDirectory(prefix="first-token-") as scratch:
        by_hand(made(scratch, "warm"), engine, model)  # whoever comes first would fill the package cache for the other
        for number in range(rounds):
            theirs.append(by_hand(made(scratch, f"theirs-{number}"), engine, model))
            ours.append(through_us(made(scratch, f"ours-{number}"), model))
    ratio = statistics.median(ours) / statistics.median(theirs)
    for name, times in (("by hand", theirs), ("enginehouse run", ours)):
        spread = f"{min(times):.2f} to {max(times):.2f}"
        print(f"{name:>16}: {statistics.median(times):.2f} s to the first token ({rounds} rounds, {spread})")
    print(f"first_token: {ratio:.2f} (bar {BAR}: time to the first token over that of the same by hand)")
    return 0 if ratio <= BAR else 1


def made(scratch: str, name: str) -> Path:
    place = Path(scratch, name)
    place.mkdir()
    return place


if __name__ == "__main__":
    sys.exit(main())
