"""What a frontend adds to a warm request: latency, requests and tokens per second, CPU, memory; over the engine itself.

Engines, load generators and nginx run beside the frontend on the same cores (serving/). The engines are stubs that
answer at once, so everything that is measured is the way there and back. Contenders take turns of a part of a second;
a figure is the median of the ratios of its rounds, which other work on the machine hardly changes. Streams of HTTP
engines come one write per token; a frontend that cannot keep up reads several at once and passes them on together.

    .venv/bin/python bench/serve.py [--quick] [--processes]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.serving import places
from bench.serving.counting import Counted, count_warm_requests
from bench.serving.places import Place

from enginehouse.core.model import Model
from enginehouse.core.replica import LOCALAI_GRPC, Replica

LIMIT_SECONDS = 60.0
AIO = str(Path(__file__).parent / "serving" / "aio_frontend.py")
OPEN_STREAMS, PACE_MS = 1000, 200
# grpc-go looks for work a while before it sleeps: direct calls without a pause find it awake, those that come at the
# pace of a frontend do not. The bar counts without; the figure with a pause says how much of it is that.
PAUSE_US = 300
CORES_FOR_TWO = 4  # two frontends, the load generator and the engine


class Load(msgspec.Struct, frozen=True):
    """What a load generator saw."""

    seconds: float
    answers: int
    tokens: int
    errors: int
    p50_us: int
    cpu_seconds: float = 0.0

    @property
    def answers_per_second(self) -> float:
        return self.answers / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the table. Without a bar it is only shown."""

    name: str
    value: float
    unit: str = ""
    bar: float | None = None
    is_at_most: bool = False
    remark: str = ""

    @property
    def margin(self) -> float:
        """One or more where the bar holds."""
        if self.bar is None:
            return float("inf")
        if self.is_at_most:
            return self.bar / self.value if self.value > 0 else float("inf")
        return self.value / self.bar


Rate = Callable[[Load], float]
Turns = dict[str, list[Load]]


class Ways:
    """The contenders, and turns between them."""

    def __init__(self, rounds: int, seconds: float) -> None:
        self._rounds = rounds
        self._seconds = seconds

    def turns(
        self, contenders: list[Place], connections: int, tokens: int, model: str = "stub", pause_us: int = 0
    ) -> Turns:
        found: Turns = {place.name: [] for place in contenders}
        # A long stream takes a tenth of a second; a turn has several one after the other.
        seconds = self._seconds * (2 if tokens > 100 else 1)
        for number in range(self._rounds + 1):
            for place in contenders:
                # The first round opens connections and is not counted.
                pause = pause_us if place.name == "direct" else 0
                seen = ask(place, connections, tokens, model=model, seconds=seconds if number else 0.1, pause=pause)
                if seen.errors:
                    raise SystemExit(f"{place.name}: {seen.errors} of {seen.answers} answers were wrong")
                if number:
                    found[place.name].append(seen)
        return found


def ask(place: Place, connections: int, tokens: int, *, model: str, seconds: float, pause: int = 0) -> Load:
    """`pause` is in microseconds between the calls of a gRPC engine, in milliseconds between tokens of the others."""
    if place.name == "direct" and model == "grpc":
        numbers = [str(one) for one in (place.port, connections, seconds, tokens, pause)]
        command = [places.built("grpc_stub"), "load", *numbers]
    else:
        numbers = [str(one) for one in (place.port, connections, seconds, tokens, pause)]
        command = [places.built("load"), *numbers, place.bearer, model]
    return msgspec.json.decode(subprocess.check_output(command, timeout=LIMIT_SECONDS), type=Load)


def ratio(turns: Turns, ours: str, theirs: str, rate: Rate) -> float:
    pairs = zip(turns[ours], turns[theirs], strict=True)
    return statistics.median(rate(one) / rate(other) for one, other in pairs if rate(other))


def median(turns: Turns, name: str, rate: Rate) -> float:
    return statistics.median(rate(one) for one in turns[name])


def p50(load: Load) -> float:
    return load.p50_us / 1000


def added_ms(turns: Turns) -> float:
    """Between the least disturbed rounds of both: other work on the machine only ever adds."""
    return min(p50(one) for one in turns["enginehouse"]) - min(p50(one) for one in turns["direct"])


def http_figures(ways: Ways, engine: Place, nginx: Place, frontend: Place) -> list[Figure]:
    all_three = [engine, nginx, frontend]
    answers, tokens = (lambda one: one.answers_per_second), (lambda one: one.tokens_per_second)
    alone = ways.turns(all_three, 1, 0)
    many = ways.turns(all_three, 32, 0)
    short = ways.turns(all_three, 32, 64)
    long = ways.turns([engine, frontend], 32, 512)
    ours, nginxs = "enginehouse", "nginx"
    reached, streams_reached = ratio(many, nginxs, "direct", answers), ratio(short, nginxs, "direct", tokens)
    return [
        Figure(name="HTTP: added latency, p50 at 1", value=added_ms(alone), unit="ms", bar=0.2, is_at_most=True),
        Figure(name="HTTP: requests/s at 32 over nginx's", value=ratio(many, ours, nginxs, answers), bar=0.25),
        Figure(name="HTTP: 64-token streams at 32 over nginx's", value=ratio(short, ours, nginxs, tokens), bar=0.7),
        Figure(
            name="HTTP: 64-token streams at 32 over direct",
            value=ratio(short, ours, "direct", tokens),
            bar=0.8,
            remark=f"  nginx reaches {streams_reached:.2f}",
        ),
        Figure(name="HTTP: 512-token streams at 32 over direct", value=ratio(long, ours, "direct", tokens), bar=0.8),
        Figure(
            name="HTTP: requests/s at 32 over direct",
            value=ratio(many, ours, "direct", answers),
            bar=0.6,
            remark=f"  nginx reaches {reached:.2f}",
        ),
        Figure(name="HTTP: requests/s at 32", value=median(many, ours, answers), unit="/s"),
        Figure(name="HTTP: the same through nginx", value=median(many, nginxs, answers), unit="/s"),
        Figure(name="HTTP: the same direct", value=median(many, "direct", answers), unit="/s"),
        Figure(name="HTTP: tokens/s of 64-token streams", value=median(short, ours, tokens), unit="/s"),
        Figure(name="HTTP: tokens/s of 512-token streams", value=median(long, ours, tokens), unit="/s"),
    ]


def grpc_figures(ways: Ways, engine: Place, frontend: Place, on_aio: Place) -> list[Figure]:
    tokens: Rate = lambda one: one.tokens_per_second  # noqa: E731
    alone = ways.turns([engine, frontend], 1, 0, "grpc")
    paced = ways.turns([engine, frontend], 1, 0, "grpc", PAUSE_US)
    short = ways.turns([engine, frontend, on_aio], 32, 64, "grpc")
    long = ways.turns([engine, frontend, on_aio], 32, 512, "grpc")
    ours = "enginehouse"
    return [
        Figure(name="gRPC: added latency, p50 at 1", value=added_ms(alone), unit="ms", bar=0.3, is_at_most=True),
        Figure(name="gRPC: the same over direct calls with pauses", value=added_ms(paced), unit="ms"),
        Figure(name="gRPC: 64-token streams at 32 over direct", value=ratio(short, ours, "direct", tokens), bar=0.8),
        Figure(name="gRPC: 512-token streams at 32 over direct", value=ratio(long, ours, "direct", tokens), bar=0.8),
        Figure(
            name="gRPC: 64-token streams at 32 over grpc.aio's",
            value=ratio(short, "enginehouse", on_aio.name, tokens),
            bar=5.0,
        ),
        Figure(
            name="gRPC: 512-token streams at 32 over grpc.aio's",
            value=ratio(long, "enginehouse", on_aio.name, tokens),
            bar=5.0,
        ),
        Figure(name="gRPC: tokens/s of 64-token streams", value=median(short, "enginehouse", tokens), unit="/s"),
        Figure(name="gRPC: tokens/s of 512-token streams", value=median(long, "enginehouse", tokens), unit="/s"),
    ]


def cost_figures(frontend: Place, seconds: float) -> list[Figure]:
    """CPU and memory while many slow streams are open, as engines that compute send them."""
    resident = psutil.Process(frontend.processes[0]).memory_info().rss
    highest = resident
    tokens = int((seconds + 10) * 1000 / PACE_MS)  # more than there is time for: no stream ends
    numbers = [str(one) for one in (frontend.port, OPEN_STREAMS, seconds, tokens, PACE_MS)]
    command = [places.built("load"), *numbers, frontend.bearer, "stub"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        time.sleep(seconds / 3)  # until all are open, which costs more than their tokens
        began, spent = time.monotonic(), frontend.cpu_seconds()
        while time.monotonic() < began + seconds / 2:
            highest = max(highest, psutil.Process(frontend.processes[0]).memory_info().rss)
            time.sleep(0.05)
        spent, took = frontend.cpu_seconds() - spent, time.monotonic() - began
        seen = msgspec.json.decode(process.communicate(timeout=LIMIT_SECONDS)[0], type=Load)
    if seen.errors or seen.answers:
        raise SystemExit(f"{seen.errors} of {OPEN_STREAMS} open streams broke, {seen.answers} ended")
    per_token = spent * 1e6 / (took * OPEN_STREAMS * 1000 / PACE_MS)
    remark = f"{OPEN_STREAMS} streams, a token each every {PACE_MS} ms, each passed on by itself"
    return [
        Figure(name="CPU per token", value=per_token, unit="µs", remark=remark),
        Figure(name=f"memory of a frontend with {OPEN_STREAMS} open streams", value=highest / 1e6, unit="MB"),
        Figure(name="memory of the same without", value=resident / 1e6, unit="MB"),
    ]


def count_figures(counted: Counted) -> list[Figure]:
    """Whole numbers; a bar of zero is written as none over the limit."""
    per = f"in {counted.requests} warm requests"
    counts = {
        "SQL statements": counted.statements,
        "bus messages": counted.messages,
        "new connections": counted.connections,
    }
    return [Figure(name=f"{name} {per}", value=count, bar=0.5, is_at_most=True) for name, count in counts.items()]


def process_figures(ways: Ways, scratch: Path, bus: str, engine: Place) -> list[Figure]:
    """One frontend and two behind one port, over PostgreSQL."""
    from tests.fleet.databases import running_server

    with running_server() as server, ExitStack() as stack:
        database = server.make_database()
        places.prepare(database, places.replica_at(engine))
        one = stack.enter_context(places.frontend("one", scratch, bus, database))
        two = stack.enter_context(places.frontend("two", scratch, bus, database, "--processes", "2"))
        turns = ways.turns([one, two], 64, 0)
    cores = os.cpu_count() or 1
    has_cores = cores >= CORES_FOR_TWO
    return [
        Figure(
            name="requests/s of two processes over one",
            value=ratio(turns, "two", "one", lambda load: load.answers_per_second),
            bar=1.6 if has_cores else None,
            remark="" if has_cores else f"no bar on {cores} cores: load generator and engine need one of them",
        )
    ]


def measure(*, quick: bool, with_processes: bool) -> list[Figure]:
    ways = Ways(7, 0.2) if quick else Ways(15, 1.0)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="serve-") as directory, ExitStack() as stack:
        scratch = Path(directory)
        engine = stack.enter_context(places.engine("stub", places.KEY))
        of_grpc = stack.enter_context(places.engine("grpc_stub"))
        nginx = stack.enter_context(places.nginx(engine, scratch))
        bus = stack.enter_context(places.nats(scratch))
        database = f"sqlite:///{scratch / 'bench.db'}"
        places.prepare(database, places.replica_at(engine), grpc_replica(of_grpc))
        frontend = stack.enter_context(places.frontend("enginehouse", scratch, bus, database))
        figures += http_figures(ways, engine, nginx, frontend)
        figures += cost_figures(frontend, 3.0 if quick else 10.0)
        figures += count_figures(asyncio.run(count_warm_requests(scratch, engine)))
        on_aio = stack.enter_context(places.frontend("grpc aio", scratch, bus, database, AIO))
        figures += grpc_figures(ways, of_grpc, frontend, on_aio)
        if with_processes:
            figures += process_figures(ways, scratch, bus, engine)
    return figures


def grpc_replica(engine: Place) -> Replica:
    model = Model(name="grpc", backend="stub", files=(), config={"template": {"use_tokenizer_template": True}})
    definition = msgspec.json.encode(model).decode()
    plain = places.replica_at(engine, "grpc")
    return msgspec.structs.replace(plain, protocol=LOCALAI_GRPC, definition=definition)


def show(figures: list[Figure]) -> None:
    for one in figures:
        shown = f"{one.value:10,.0f}" if one.value >= 1000 or float(one.value).is_integer() else f"{one.value:10.3f}"
        bar = ""
        if one.bar is not None:
            limit = "at most" if one.is_at_most else "at least"
            bar = f"bar: {limit} {0 if one.bar == 0.5 and one.is_at_most else one.bar:g}"
            bar += "" if one.margin >= 1 else "  MISSED"
        print(f"{one.name:>52}: {shown} {one.unit:3} {bar}{one.remark}")


def main() -> int:
    parser = argparse.ArgumentParser(description="What a frontend adds to a warm request.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under 50 s")
    parser.add_argument("--processes", action="store_true", help="also two frontends behind one port")
    given = parser.parse_args()
    figures = measure(quick=given.quick, with_processes=given.processes or not given.quick)
    show(figures)
    worst = min(figures, key=lambda one: one.margin)
    bars = sum(one.bar is not None for one in figures)
    print(f"serve: {worst.margin:.2f} (bar 1: the worst of {bars} figures over its bar, which is {worst.name!r})")
    return 0 if worst.margin >= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
