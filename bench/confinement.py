"""What confinement costs an engine: the time until it is ready, and the time of its answers, over the same unconfined.

Both are the built-in engine with the toy model, started by a worker's own supervisor on one data directory; they take
turns, so that whatever else the machine does counts for both.

    .venv/bin/python bench/confinement.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from enginehouse.build_worker import make_installation, make_models
from enginehouse.core.gallery import find_model, resolve
from enginehouse.core.model import Model
from enginehouse.engine.openai.client import HttpEngine
from enginehouse.fetch.galleries.sources import load_builtin
from enginehouse.host import confinement, hardware
from enginehouse.host.confinement import Confinement
from enginehouse.ports import EngineCall
from enginehouse.worker.backends.installation import InstallerOptions
from enginehouse.worker.backends.installer import InstallRequest
from enginehouse.worker.engines.process_table import StartRequest
from enginehouse.worker.engines.supervisor import Supervisor
from enginehouse.worker.options import WorkerOptions

BAR = 1.1
MODEL = "tiny-chat"
KEY = "bench"
LIMIT_SECONDS = 30.0
QUESTION = {"messages": [{"role": "user", "content": "Tell me about Paris."}], "temperature": 0, "max_tokens": 64}


def model() -> Model:
    found = find_model((load_builtin(),), MODEL)
    assert found is not None
    return found


def place_of(directory: Path, chosen: Confinement) -> WorkerOptions:
    backends = directory / "backends"
    installing = InstallerOptions(backends=backends, data=directory, confinement=chosen, may_link=chosen.protects_trees)
    port = 30000 + os.getpid() % 20000
    return WorkerOptions(directory=directory, name="bench", base_port=port, installing=installing)


async def install(directory: Path) -> None:
    place = place_of(directory, confinement.NONE)
    place.make_directories()
    made = make_installation(place.installing, os.environ)
    engine = resolve((load_builtin(),), model().backend, "default", hardware.platform())

    async def nothing() -> None:
        """No process runs from the old version."""

    try:
        await made.installer.install(InstallRequest(resolved=engine, generation=1), lambda *_: None, nothing)
        await make_models(place, made, os.environ).pull(model(), 1, lambda *_: None)
    finally:
        await made.close()


async def once(directory: Path, chosen: Confinement, answers: int) -> tuple[float, float]:
    """Seconds until the engine is ready, and seconds of so many answers, one after the other."""
    place, engine = place_of(directory, chosen), HttpEngine()
    made = make_installation(place.installing, os.environ)
    supervisor = Supervisor(
        place,
        made.trees,
        make_models(place, made, os.environ),
        engine,
        environment=os.environ,
        enclosures=made.enclosures,
        changed=lambda: None,
    )
    request = StartRequest(model=model(), slot=0, directory="xllamacpp", key=KEY)
    try:
        async with supervisor:
            began = time.perf_counter()
            started = await supervisor.start(request)
            ready = time.perf_counter() - began
            began = time.perf_counter()
            for _ in range(answers):
                await ask(engine, started.address)
            return ready, time.perf_counter() - began
    finally:
        await engine.close()
        await made.close()


async def ask(engine: HttpEngine, address: str) -> None:
    call = EngineCall(
        address=address, key=KEY, method="POST", path="/v1/chat/completions", body=msgspec.json.encode(QUESTION)
    )
    response = await engine.send(call, connect_seconds=LIMIT_SECONDS, head_seconds=LIMIT_SECONDS)
    try:
        async for _ in response.chunks():
            pass
        if response.status != 200:
            raise SystemExit(f"the engine answered {response.status}")
    finally:
        await response.close()


async def main() -> int:
    parser = argparse.ArgumentParser(description="Start time and answers of a confined engine, over an unconfined one.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under 50 s")
    rounds, answers = (15, 20) if parser.parse_args().quick else (40, 60)
    ways = {"unconfined": confinement.choose("off", ""), "confined": confinement.choose("auto", "")}
    if not ways["confined"].is_on:
        raise SystemExit(f"there is nothing to measure here: {ways['confined'].described}")
    starts: dict[str, list[float]] = {name: [] for name in ways}
    speaks: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(prefix="confinement-") as scratch:
        await install(Path(scratch))
        # Round 0 warms the page cache and is not counted.
        for number in range(rounds + 1):
            for name, chosen in ways.items():
                ready, spoke = await once(Path(scratch), chosen, answers)
                if number:
                    starts[name].append(ready)
                    speaks[name].append(spoke)
    ratios = []
    for what, times in (("ready", starts), ("answers", speaks)):
        medians = {name: statistics.median(each) for name, each in times.items()}
        ratios.append(medians["confined"] / medians["unconfined"])
        for name, median in medians.items():
            print(f"{what:>8} {name:>10}: {median * 1000:.1f} ms ({rounds} rounds, from {min(times[name]) * 1000:.1f})")
        print(f"{what:>8}      ratio: {ratios[-1]:.3f}")
    worst = max(ratios)
    print(f"confinement: {worst:.2f} (bar {BAR}: the worse of start and answers, confined over unconfined)")
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
