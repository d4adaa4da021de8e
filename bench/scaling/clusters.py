"""The servers of bench/scale.py and what they use: NATS with accounts, frontends over one database, PostgreSQL.

Frontends are real processes with the defaults of the product. CPU time is what the kernel counted for a process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import psutil
import psycopg
from bench.fanout import LIMIT_SECONDS, TOKENS, free_port, until_ready

from enginehouse.bus import credentials, embedded
from enginehouse.core.model import Model
from enginehouse.host import processes
from enginehouse.link.client import FrontendClient
from enginehouse.store import db, models
from enginehouse.store.db import Connection, Store

WARM_MODEL = "warm"
_ENDS_OF_TRANSACTIONS = (b": BEGIN", b": COMMIT", b": ROLLBACK", b": begin", b": commit", b": rollback")


class RunningFrontend:
    def __init__(self, port: int, pid: int) -> None:
        self.port = port
        self._process = psutil.Process(pid)
        self.client = FrontendClient(f"http://127.0.0.1:{port}", TOKENS["admin"], user_agent="bench")

    def cpu_seconds(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


class PostgresMeter:
    """What a PostgreSQL server of `bench.backlog.databases` has used. Statements are counted in its log."""

    def __init__(self, directory: Path, database: str) -> None:
        self._log = directory / "log"
        self._database = database
        self._postmaster = psutil.Process(int((directory / "postmaster.pid").read_text().split()[0]))

    def cpu_seconds(self) -> float:
        times = self._postmaster.cpu_times()
        spent = times.user + times.system + times.children_user + times.children_system
        for child in self._postmaster.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                own = child.cpu_times()
                spent += own.user + own.system
        return float(spent)

    @contextlib.contextmanager
    def counting(self, counted: list[int]) -> Iterator[None]:
        """Appends how many statements there were, without those that begin and end transactions, and how many
        transactions."""
        self._tell("alter system set log_statement = 'all'", "select pg_reload_conf()")
        start, transactions = self._log.stat().st_size, self._transactions()
        try:
            yield
        finally:
            after = self._transactions()
            with self._log.open("rb") as log:
                log.seek(start)
                lines = [line for line in log if b"statement: " in line or b"LOG:  execute " in line]
            self._tell("alter system reset log_statement", "select pg_reload_conf()")
        counted += [sum(not any(end in line for end in _ENDS_OF_TRANSACTIONS) for line in lines), after - transactions]

    def _transactions(self) -> int:
        query = "select sum(xact_commit) from pg_stat_database where datname = current_database()"
        with psycopg.connect(self._database, autocommit=True) as connection:
            row = connection.execute(query).fetchone()
        assert row is not None
        return int(row[0])

    def _tell(self, *statements: str) -> None:
        with psycopg.connect(self._database, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())


class Cluster:
    """NATS, and frontends over one database. `start_frontend` may be called more than once."""

    def __init__(self, place: Path, database: str, keys: Sequence[str], stack: contextlib.AsyncExitStack) -> None:
        self._place = place
        self._database = database
        self._keys = keys
        self._stack = stack
        self._accounts_in = place / "bus"
        self.accounts = credentials.load_or_create(self._accounts_in)
        self._server = embedded.prepare(
            self._accounts_in, self.accounts, host="127.0.0.1", port=free_port(), log_path=place / "nats.log"
        )
        self.frontends: list[RunningFrontend] = []

    @property
    def bus_url(self) -> str:
        return self._server.url

    async def start_bus(self) -> None:
        child = await processes.spawn(
            self._server.argv, directory=self._place, environment=os.environ, log=self._place / "nats.log"
        )
        self._stack.push_async_callback(processes.stop_group, child, LIMIT_SECONDS)

    async def start_frontend(self) -> RunningFrontend:
        number, port = len(self.frontends), free_port()
        data = self._place / f"frontend-{number}"
        data.mkdir()
        shutil.copytree(self._accounts_in, data / "bus")
        for role, token in TOKENS.items():
            (data / f"{role}.token").write_text(token)
        # In the file: a command line has no room for the keys of thousands.
        quoted = ", ".join(f'"{key}"' for key in self._keys)
        (data / "enginehouse.toml").write_text(f"approve_keys = [{quoted}]\n")
        argv = [sys.executable, "-m", "enginehouse", "frontend", "--data", str(data), "--port", str(port)]
        argv += ["--nats-url", self.bus_url, "--backend-galleries", "[]"]
        environment = {**os.environ, "ENGINEHOUSE_DATABASE_URL": self._database}
        log = self._place / f"frontend-{number}.log"
        child = await processes.spawn(argv, directory=data, environment=environment, log=log)
        self._stack.push_async_callback(processes.stop_group, child, LIMIT_SECONDS)
        started = RunningFrontend(port, child.pid)
        try:
            await until_ready(started.client)
        except SystemExit as error:
            raise SystemExit(f"{error}: {log.read_text()[-2000:]}") from error
        self.frontends.append(started)
        return started


@contextlib.asynccontextmanager
async def running_cluster(place: Path, database: str, keys: Sequence[str], engine_port: int) -> AsyncIterator[Cluster]:
    """With one frontend, and a model that a server elsewhere serves, so that there are warm requests without nodes."""
    await add_warm_model(database, engine_port)
    async with contextlib.AsyncExitStack() as stack:
        cluster = Cluster(place, database, keys, stack)
        await cluster.start_bus()
        await cluster.start_frontend()
        yield cluster


async def add_warm_model(database: str, engine_port: int) -> None:
    store = await Store.open(database)
    model = Model(name=WARM_MODEL, backend="", files=(), endpoint=f"127.0.0.1:{engine_port}")

    def work(connection: Connection) -> None:
        models.insert(connection, model, db.now(connection))

    try:
        await store.transaction(work)
    finally:
        store.close()
