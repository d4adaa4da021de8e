"""Connects a command to its frontend.

A terminal shows every wait that lasts longer than a moment. Answers are decoded to plain values, so that `--json` shows
all that the frontend sent, including fields that this version does not know; `read` converts them to structs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar
from urllib.parse import quote

import click
import msgspec

from enginehouse import __version__
from enginehouse.cli.options.shared import given
from enginehouse.cli.terminal.output import is_terminal
from enginehouse.core.errors import Invalid, Unavailable
from enginehouse.link.client import REQUEST_SECONDS, FrontendClient
from enginehouse.settings.programs import ClientSettings, load

T = TypeVar("T")

_CONNECTED = "enginehouse.connected"
TRIES = 3  # a restarting frontend is back within two seconds
PAUSE_SECONDS = 0.7
GALLERY_SECONDS = 20.0  # a frontend that has just started reads its galleries within a few
_MAY_HAVE_BEEN_ACCEPTED = frozenset({"store_unavailable", "frontend_unreachable"})
QUIET_SECONDS = 0.6  # most answers arrive sooner, and a line that only flickers is noise


class FrontendApi:
    """Requests to the frontend of this command. A quiet one shows no waits, because the screen is not its own."""

    def __init__(self, client: FrontendClient, *, is_quiet: bool = False) -> None:
        self.client = client
        self._is_quiet = is_quiet

    @property
    def url(self) -> str:
        return self.client.url

    def get(self, path: str, *, timeout_seconds: float = REQUEST_SECONDS) -> object:
        return self._ask("GET", path, None, timeout_seconds)

    def post(self, path: str, body: object = None, *, timeout_seconds: float = REQUEST_SECONDS) -> object:
        return self._ask("POST", path, body, timeout_seconds)

    def delete(self, path: str, *, timeout_seconds: float = REQUEST_SECONDS) -> object:
        return self._ask("DELETE", path, None, timeout_seconds)

    def request(
        self, method: str, path: str, body: object = None, *, timeout_seconds: float = REQUEST_SECONDS
    ) -> object:
        """Request an operation. The idempotency key makes a retry after a lost answer the same request. Also retries
        while the frontend has not read a gallery yet.
        """
        key, tries = uuid.uuid4().hex, TRIES
        read_by = time.monotonic() + GALLERY_SECONDS
        with self._waiting():
            while True:
                tries -= 1
                try:
                    return self.client.request(method, path, body, object, key=key, timeout_seconds=timeout_seconds)
                except Unavailable as error:
                    may_be_read = error.code == "gallery_loading" and time.monotonic() < read_by
                    if not may_be_read and (error.code not in _MAY_HAVE_BEEN_ACCEPTED or tries <= 0):
                        raise
                time.sleep(PAUSE_SECONDS)

    def _waiting(self) -> AbstractContextManager[None]:
        return nullcontext() if self._is_quiet else waiting(f"waiting for {self.url}")

    def _ask(self, method: str, path: str, body: object, timeout_seconds: float) -> object:
        with self._waiting():
            return self.client.request(method, path, body, object, timeout_seconds=timeout_seconds)


def connect() -> FrontendApi:
    """The frontend that the flags, the environment or the data directory name."""
    context = click.get_current_context()
    known: FrontendApi | None = context.meta.get(_CONNECTED)
    if known is not None:
        return known  # a list that is watched asks again and again
    settings = load(ClientSettings, given().server, os.environ)
    if "," in settings.url:
        raise Invalid("cannot use several frontends: give the address of one", code="invalid_setting", param="url")
    client = FrontendClient(settings.url, settings.token, user_agent=f"enginehouse/{__version__}")
    context.call_on_close(client.close)
    return FrontendApi(client)


@contextmanager
def connected_quietly() -> Iterator[FrontendApi]:
    """One connection for all that asks `connect` inside, which shows no waits: the screen is not its own."""
    frontend = FrontendApi(connect().client, is_quiet=True)
    meta = click.get_current_context().meta
    meta[_CONNECTED] = frontend
    try:
        yield frontend
    finally:
        del meta[_CONNECTED]


def has_server() -> bool:
    """Whether a server is given, or found in the data directory."""
    try:
        load(ClientSettings, {**given().server, "token": None}, os.environ)
    except Unavailable as error:
        if error.code == "no_server":
            return False
        raise
    return True


def read(answer: object, kind: type[T]) -> T:
    """Convert an answer to a struct."""
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise Unavailable(
            f"cannot read the answer of the frontend: {error}; check that both sides have the same version",
            code="upstream_error",
        ) from error


def segment(value: str) -> str:
    """`value` as one segment of a path; names of models may contain slashes."""
    return quote(value, safe="")


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show `text` on a terminal while a wait lasts longer than a moment, and erase it afterwards."""
    if not is_terminal(sys.stderr):
        yield
        return
    over = threading.Event()
    sign = threading.Thread(target=_show_waiting, args=(text, over), daemon=True)
    sign.start()
    try:
        yield
    finally:
        over.set()
        sign.join()


def _show_waiting(text: str, over: threading.Event) -> None:
    if over.wait(QUIET_SECONDS):
        return
    started = time.monotonic()
    while True:
        seconds = int(time.monotonic() - started + QUIET_SECONDS)
        sys.stderr.write(f"\r\x1b[2K{text} … {seconds} s" if seconds else f"\r\x1b[2K{text} …")
        sys.stderr.flush()
        if over.wait(0.5):
            break
    sys.stderr.write("\r\x1b[2K")
    sys.stderr.flush()
