"""A registry behind a proxy with misfortunes, and a gallery that names what is in it, for tests that are plain
functions: the servers run on a loop in a thread of their own.

    warehouse.publish("engine", "one", megabytes=4)      # engine:latest says "one"
    warehouse.proxy.bytes_per_second = 2_000_000
    fleet.request("install", "engine")
"""

from __future__ import annotations

import asyncio
import json
import threading
import zlib
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.fetch.faulty import Faulty, faulty
from tests.fetch.images import Image, write_image
from tests.fetch.real_registry import Registry, running_registry
from tests.worker.shelf import launcher, noise

from enginehouse.host import hardware

T = TypeVar("T")
LIMIT_SECONDS = 60.0
MEGABYTE = 1_000_000
# A name that leads to a build on every machine.
META, META_BUILD = "family", "family-default"


class Warehouse:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._stack = AsyncExitStack()
        self._entries: dict[str, dict[str, object]] = {}
        self._count = 0
        self.gallery = root / "gallery.yaml"
        self.registry: Registry
        self.proxy: Faulty

    def start(self) -> None:
        self._thread.start()
        self.gallery.write_text("[]\n")

        async def opened() -> None:
            self.registry = await self._stack.enter_async_context(running_registry(self._root))
            self.proxy = await self._stack.enter_async_context(faulty(self.registry.address))

        self.run(opened())

    def close(self) -> None:
        self.run(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_SECONDS)
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LIMIT_SECONDS)

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """The same without waiting for its end, which is the caller's to see."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Any, *arguments: Any) -> Any:
        """Run a plain function on the loop of the servers: the proxy is not for other threads to change."""

        async def called() -> Any:
            return function(*arguments)

        return self.run(called())

    def calm(self) -> None:
        """No misfortunes from now on."""
        self.proxy.bytes_per_second = None
        self.call(self.proxy.forget_plans)

    def publish(self, name: str, says: str, *, megabytes: float = 0.2, platform: str = "", run: bytes = b"") -> Image:
        """An image under NAME:latest whose launcher says this, or is `run`; the gallery names it from now on. The bulk
        of it is the same for every version of a name.
        """
        self._count += 1
        layout = self._root / f"layout-{self._count}"
        bulk = {"bulk.so": noise(int(megabytes * MEGABYTE), zlib.crc32(name.encode()))}
        files = [bulk, {"run.sh": run or launcher(says)}]
        image = write_image(layout, files, platform=platform or hardware.platform())
        self.run(self.registry.push(layout, f"{name}:latest"))
        self.offer(name, self.proxy.reference(f"{name}:latest"))
        return image

    def offer(self, name: str, uri: str) -> None:
        """A gallery entry. Galleries are read again only now and then: offer everything before the frontends start."""
        self._enter({"name": name, "uri": uri})

    def offer_meta(self, name: str, build: str) -> None:
        """A gallery entry that means another one."""
        self._enter({"name": name, "capabilities": {"default": build}})

    def offer_package(self, name: str, package: str, sha256: str) -> None:
        """A gallery entry for a Python package of exactly these bytes."""
        self._enter({"name": name, "uri": f"pypi:{package}", "requirements": [f"{package} --hash=sha256:{sha256}"]})

    def _enter(self, entry: dict[str, object]) -> None:
        self._entries[str(entry["name"])] = entry
        self.gallery.write_text(json.dumps([self._entries[name] for name in sorted(self._entries)]))  # JSON is YAML

    @property
    def environment(self) -> dict[str, str]:
        galleries = [{"name": "lab", "url": f"file://{self.gallery}"}]
        return {
            "ENGINEHOUSE_BACKEND_GALLERIES": json.dumps(galleries),
            "ENGINEHOUSE_MODEL_GALLERIES": "[]",
            "ENGINEHOUSE_ALLOWED_HOSTS": "127.0.0.1",
            "ENGINEHOUSE_CAPABILITY": "default",
        }


@contextmanager
def open_warehouse(root: Path) -> Iterator[Warehouse]:
    made = Warehouse(root)
    made.start()
    try:
        yield made
    finally:
        made.close()
