"""The only import of nats-py, without aiohttp.

nats-py imports aiohttp if it is there, for web sockets. No address of a bus has those (`bus.address`), and importing
aiohttp takes four times as long as importing nats-py itself: a sixth of a frontend's start.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def _without(name: str) -> Iterator[None]:
    """Have imports of a module fail meanwhile, unless it is loaded. Programs import this before they start threads."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # as the import system defines it
    try:
        yield
    finally:
        del sys.modules[name]


with _without("aiohttp"):
    from nats import errors
    from nats.aio.client import Client, Server
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

__all__ = ["Client", "Msg", "Server", "Subscription", "errors"]
