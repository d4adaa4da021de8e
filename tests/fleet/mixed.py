"""Two real frontends and a stand-in of LocalAI's worker (`tests.standin`), with a server that has the files of models.

mixed.add_model("m", mixed.publish("m.gguf", content))
mixed.load("m"); assert mixed.chat("m") == (200, SAYS)
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from tests.e2e.conftest import wait_for
from tests.fetch.faulty import Faulty, faulty
from tests.fleet.cluster import Fleet, Frontend, Process
from tests.fleet.engines import ask
from tests.ports import ports_in_a_row
from tests.standin.control import Control

from enginehouse.core.model import Model, ModelFile

NODE = "go-1"
BACKEND = "speaker"
# The last two are those of the recordings.
ENTRIES = (
    {"name": BACKEND, "uri": "registry.example/speaker:latest"},
    {"name": "mock", "capabilities": {"default": "cpu-mock"}},
    {"name": "cpu-mock", "alias": "mock", "uri": "registry.example/lab/mock:latest"},
)
LIMIT_SECONDS = 60.0


class SourceServer:
    """A web server with files, on a loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._stack = AsyncExitStack()
        self.server: Faulty

    def start(self) -> None:
        self._thread.start()

        async def opened() -> None:
            self.server = await self._stack.enter_async_context(faulty(""))

        asyncio.run_coroutine_threadsafe(opened(), self._loop).result(LIMIT_SECONDS)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stack.aclose(), self._loop).result(LIMIT_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_SECONDS)
        self._loop.close()


class MixedFleet:
    def __init__(self, root: Path, database_url: str, **environment: str) -> None:
        self._gallery = root / "gallery.yaml"
        self._gallery.write_text(json.dumps(ENTRIES))
        self._galleries = [{"name": "lab", "url": f"file://{self._gallery}"}]
        environment |= {
            "ENGINEHOUSE_BACKEND_GALLERIES": json.dumps(self._galleries),
            "ENGINEHOUSE_MODEL_GALLERIES": "[]",
            "ENGINEHOUSE_ALLOWED_HOSTS": "127.0.0.1",
        }
        self.fleet = Fleet(root, database_url, environment)
        self.sources = SourceServer()
        self.data = root / NODE
        self.data.mkdir()
        self.control = Control(self.data)
        self._base = 0
        self.worker: Process | None = None
        self._models: list[str] = []

    def start(self) -> None:
        self.sources.start()
        self.fleet.start(frontends=2, workers=0)
        for frontend in self.fleet.frontends:
            wait_for("the gallery", partial(self._has_gallery, frontend))
        self.start_worker()
        self.fleet.first.post(f"/api/nodes/{NODE}/approve")
        self.fleet.until_healthy(NODE)

    def _has_gallery(self, frontend: Frontend) -> bool:
        return any(one["name"] == BACKEND for one in frontend.get("/backends/available"))

    def start_worker(self) -> None:
        self._base = self._base or ports_in_a_row(200)
        urls = ",".join(one.url for one in self.fleet.frontends)
        line = (sys.executable, "-m", "tests.standin.worker", NODE, urls, self.fleet.nats_url)
        token = {"LOCALAI_REGISTRATION_TOKEN": self.fleet.tokens["join"]}
        arguments = (*line, str(self._base), str(self.data))
        self.worker = Process(NODE, arguments, self.fleet.root / f"{NODE}.log", token)
        self.worker.start()
        wait_for(f"{NODE} to register", lambda: self.fleet.node(NODE))

    def end_worker(self) -> None:
        """With its backends, which are of its session."""
        assert self.worker is not None
        with suppress(ProcessLookupError):
            os.killpg(self.worker.pid, signal.SIGKILL)
        self.worker.kill()

    def end(self) -> None:
        self.end_worker()
        self.fleet.end()
        self.sources.close()

    def mend(self) -> None:
        """As at the beginning, whatever a test did."""
        self.control.set()
        self.sources.server.bytes_per_second = None
        self.sources.server.forget_plans()
        for process in (self.fleet.nats, *self.fleet.frontends):
            if not process.is_alive:
                process.start()
        self.fleet.until_ready()
        self.fleet.until_healthy(NODE)
        while self._models:
            self.fleet.ended(self.fleet.first.delete(f"/api/models/{self._models.pop()}"))
        wait_for("no process to be left", lambda: not self.running())
        self.control.forget()

    # Models ---------------------------------------------------------------------------------------

    def publish(self, name: str, content: bytes, *, has_digest: bool = True, spoilt: bytes = b"") -> ModelFile:
        """A file of the source server. With `spoilt`, it gives these bytes although others are announced."""
        self.sources.server.files[f"/{name}"] = spoilt or content
        digest = hashlib.sha256(content).hexdigest() if has_digest else ""
        return ModelFile(name, f"{self.sources.server.url}/{name}", digest, len(content) if has_digest else 0)

    def add_model(self, model: str, *files: ModelFile, options: tuple[str, ...] = (), backend: str = BACKEND) -> None:
        config = {"options": [f"stub.{one}" for one in options]}
        made = Model(name=model, backend=backend, files=files, config=config)
        definition = msgspec.json.encode(made).decode()
        self.fleet.rows("insert into models (name, definition, created_at) values (%s, %s, 0)", model, definition)
        self._models.append(model)

    def begin(self, model: str, frontend: Frontend | None = None) -> dict[str, Any]:
        found: dict[str, Any] = (frontend or self.fleet.first).post(f"/api/models/{model}/load", {"node": NODE})
        return found

    def load(self, model: str) -> dict[str, Any]:
        ended = self.fleet.ended(self.begin(model))
        assert ended["status"] == "succeeded", ended
        return ended

    def forget_model(self, model: str) -> None:
        self._models.remove(model)

    def chat(self, model: str, frontend: Frontend | None = None) -> tuple[int, str]:
        return ask((frontend or self.fleet.first).port, self.fleet.tokens["admin"], model)

    # Looking --------------------------------------------------------------------------------------

    def row(self, operation: dict[str, Any], kind: str, frontend: Frontend | None = None) -> dict[str, Any]:
        """The row of one step, {} if it has not begun."""
        found = (frontend or self.fleet._any()).operation(operation["jobID"]).get("nodes", ())
        return next((one for one in found if one["kind"] == kind), {})

    def carrier_of(self, model: str, kind: str) -> Frontend:
        """The frontend that carries out a step now, by its log."""
        subject = f"model:{model}" if kind == "pull_model" else f"replica:{model}#0"

        def found() -> Frontend | None:
            rows = self.fleet.rows(
                "select id from intents where subject = %s and state = 'running' order by generation desc", subject
            )
            lines = [f"command.carried intent={row[0]}" for row in rows[:1]]
            alive = [one for one in self.fleet.frontends if one.is_alive]
            return next((one for one in alive if lines and lines[0] in self.fleet.log_of(one.name)), None)

        carrier: Frontend = wait_for(f"somebody to carry out {kind} of {model}", found)
        return carrier

    def running(self) -> list[str]:
        """The backend processes that the worker has, whatever it says."""
        assert self.worker is not None
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                line = path.read_bytes().decode(errors="replace").split("\0")
                if any(str(self.data / "backends") in part for part in line):
                    found.append(" ".join(line))
        return found

    def account(self, started: list[str]) -> str:
        """What is known of these processes, for the message of a failure."""
        asked = [
            one["payload"] for one in self.control.requests("nats") if one["verb"] in ("backend.install", "model.stop")
        ]
        loads = self.fleet.rows("select name, author, created_at from operations order by created_at desc limit 8")
        return "\n".join([*started, *map(str, asked), *map(str, loads)])

    def puts(self) -> list[dict[str, Any]]:
        return [one for one in self.control.requests("http") if one["method"] == "PUT"]

    def placed(self, model: str, name: str) -> Path:
        return self.data / "models" / model / name


def noise(count: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(count)


@contextmanager
def open_mixed(root: Path, database_url: str, **environment: str) -> Iterator[MixedFleet]:
    made = MixedFleet(root, database_url, **environment)
    try:
        made.start()
        yield made
    finally:
        made.end()
