"""How long starting takes: `enginehouse --help` over a bare interpreter, and `enginehouse up` over two bare servers.

`up` is measured from the start of its process until it says that it is up: then the frontend serves, and the local
worker is registered, approved and connected; once on a fresh data directory, where keys and the database are made, and
once on one that it had before. Beside it, a bare nats-server and an empty application under uvicorn start at the same
moment until both answer. They take turns.

    .venv/bin/python bench/start.py [--quick]
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from enginehouse.bus.embedded import find_program

HELP_BAR, UP_BAR = 6.0, 3.0
PROGRAM = str(Path(sys.executable).with_name("enginehouse"))
LIMIT_SECONDS = 60.0  # a round takes two seconds; beyond this something hangs
EMPTY = """
import sys, uvicorn

async def application(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

uvicorn.run(application, port=int(sys.argv[1]), lifespan="off", log_level="error")
"""
# Whoever forbids Python to keep what it has compiled would measure its compiler.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
OFFLINE = {"ENGINEHOUSE_BACKEND_GALLERIES": "[]", "ENGINEHOUSE_MODEL_GALLERIES": "[]"}


def seconds_of(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def seconds_of_up(place: Path) -> float:
    ports = ("--port", str(free_port()), "--nats-port", str(free_port()))
    command = [PROGRAM, "up", "--data", str(place / "data"), "--name", "bench", *ports]
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, **OFFLINE}
    ) as process:
        assert process.stdout is not None
        try:
            while b"Enginehouse is up" not in (line := process.stdout.readline()):
                if not line:
                    raise SystemExit(f"`enginehouse up` ended with {process.wait()}")
            return time.perf_counter() - began
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=LIMIT_SECONDS)


def seconds_of_bare_servers(place: Path) -> float:
    nats, http = free_port(), free_port()
    began = time.perf_counter()
    commands = (
        [find_program(), "-a", "127.0.0.1", "-p", str(nats), "-l", str(place / "nats.log")],
        [sys.executable, "-c", EMPTY, str(http)],
    )
    servers = [subprocess.Popen(command) for command in commands]
    try:
        until(lambda: says(nats, b"", b"INFO"))
        until(lambda: says(http, b"GET / HTTP/1.1\r\nhost: here\r\n\r\n", b"HTTP/1.1 200"))
        return time.perf_counter() - began
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait(LIMIT_SECONDS)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit("a bare server did not come up")
        time.sleep(0.005)


def says(port: int, asked: bytes, expected: bytes) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connected:
            connected.sendall(asked)
            return connected.recv(64).startswith(expected)
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ratio_of(what: str, bar: float, ways: dict[str, Callable[[], float]], rounds: int) -> float:
    """The worst median over that of the last way; the ways take turns, and round 0 warms the page cache."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, measure in ways.items():
            took = measure()
            if number:
                times[name].append(took)
    for name, each in times.items():
        print(f"{name:>34}: {statistics.median(each) * 1000:6.0f} ms ({rounds} rounds, from {min(each) * 1000:.0f})")
    *ours, theirs = (statistics.median(each) for each in times.values())
    worst = max(ours)
    print(f"{what:>34}: {worst / theirs:.2f} (bar {bar:g})")
    return worst / theirs


def main() -> int:
    parser = argparse.ArgumentParser(description="Start of the command line and of `up`, over what they are made of.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under 50 s")
    calls, starts = (25, 5) if parser.parse_args().quick else (100, 25)
    with tempfile.TemporaryDirectory(prefix="bench-start-") as scratch:

        def fresh() -> Path:
            return Path(tempfile.mkdtemp(dir=scratch))

        known = fresh()
        help_ratio = ratio_of(
            "help",
            HELP_BAR,
            {
                "enginehouse --help": lambda: seconds_of([PROGRAM, "--help"]),
                "python -c pass": lambda: seconds_of([sys.executable, "-c", "pass"]),
            },
            calls,
        )
        up_ratio = ratio_of(
            "up",
            UP_BAR,
            {
                "enginehouse up, for the first time": lambda: seconds_of_up(fresh()),
                "enginehouse up, again": lambda: seconds_of_up(known),
                "bare nats-server and empty uvicorn": lambda: seconds_of_bare_servers(fresh()),
            },
            starts,
        )
    worst = max(help_ratio / HELP_BAR, up_ratio / UP_BAR)
    print(f"start: {worst:.2f} (bar 1: the worse of both ratios over its bar)")
    return 0 if worst <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
