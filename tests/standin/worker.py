"""A stand-in for LocalAI's Go worker, made from the fact sheet and with none of our code on its side of the wire: it
registers without a key, answers LocalAI's ten subjects and no other, has its file server on base port - 1, and starts
real backend processes.

    python -m tests.standin.worker NAME URL[,URL] NATS-URL BASE-PORT DATA     (the token in LOCALAI_REGISTRATION_TOKEN)

Two things are simpler than in LocalAI: an image is not pulled, a stub backend takes its place under the name that the
gallery gives it; and only `backend.install` runs beside other messages. Faults are in `control.json`: `no_stop` (a
worker older than `model.stop`), `ignored` (verbs that get no answer), and those of the file server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import nats
from aiohttp import web
from nats.aio.msg import Msg
from tests.engine.localai.stub_backend import write_tree
from tests.ports import is_free
from tests.standin.control import Control
from tests.standin.files import FileServer

from enginehouse.engine.localai import backend_pb2 as pb

HEARTBEAT_SECONDS = 0.5
READY_SECONDS = 30.0
FREE_SECONDS = 5.0
LOG_LINES = 20
SERIAL = ("backend.stop", "backend.delete", "backend.list", "models.running", "model.unload", "model.delete", "stop")


class Backend:
    """One backend process."""

    def __init__(self, key: str, backend: str, port: int, process: asyncio.subprocess.Process) -> None:
        self.key, self.backend, self.port, self.process = key, backend, port, process
        self.is_stopping = False

    @property
    def address(self) -> str:
        """As the worker records it."""
        return f"127.0.0.1:{self.port}"

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None


class StandIn:
    def __init__(self, name: str, urls: list[str], nats_url: str, base: int, data: Path, token: str) -> None:
        self._name, self._urls, self._nats_url, self._base, self._token = name, urls, nats_url, base, token
        self._backends, self._models = data / "backends", data / "models"
        for directory in (self._backends, self._models):
            directory.mkdir(parents=True, exist_ok=True)
        self._control = Control(data)
        self._files = FileServer(self._models, token, self._control)
        self._processes: dict[str, Backend] = {}
        self._next_port = base
        self._installing: dict[str, asyncio.Lock] = {}
        self._node_id = ""
        self._group: asyncio.TaskGroup

    async def run(self) -> None:
        runner = web.ServerRunner(web.Server(self._files.answer))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self._base - 1).start()
        await self._register()
        bus = await nats.connect(self._nats_url, max_reconnect_attempts=-1)
        async with asyncio.TaskGroup() as self._group:
            await self._listen(bus, "backend.install", self._in_own_task)
            await self._listen(bus, "backend.upgrade", self._in_own_task)
            for verb in SERIAL:
                await self._listen(bus, verb, self._answer)
            if not self._control.get("no_stop"):
                await self._listen(bus, "model.stop", self._answer)
            await self._beat()

    async def _listen(self, bus: Any, verb: str, take: Any) -> None:
        await bus.subscribe(f"nodes.{self._node_id}.{verb}", cb=take)

    async def _register(self) -> None:
        body = {
            "name": self._name,
            "address": f"127.0.0.1:{self._base}",
            "http_address": f"127.0.0.1:{self._base - 1}",
            "token": self._token,
            "total_vram": 0,
            "available_vram": 0,
            "total_ram": 25274793984,
            "available_ram": 24618422272,
            "gpu_vendor": "",
            "gpu_compute_capability": "",
            "capability": "default",
            "labels": {"node.replica-slots": "2"},
            "max_replicas_per_model": 2,
        }
        answer = await self._post("/api/node/register", body)
        self._node_id = str(answer["id"])

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        for url in self._urls * 20:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._token}"}) as session:
                    async with session.post(url + path, json=body) as answer:
                        if answer.status < 300:
                            return await answer.json()
            await asyncio.sleep(0.1)
        raise RuntimeError(f"no frontend takes {path}")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            with contextlib.suppress(RuntimeError):
                await self._post(f"/api/node/{self._node_id}/heartbeat", {"available_ram": 24620552192})

    # Messages -------------------------------------------------------------------------------------

    async def _in_own_task(self, message: Msg) -> None:
        self._group.create_task(self._answer(message))

    async def _answer(self, message: Msg) -> None:
        verb = message.subject.split(".", 2)[2]
        asked = json.loads(message.data or b"null") or {}
        if verb not in ("backend.list", "models.running"):
            self._control.note("nats", verb=verb, payload=asked)
        if verb in self._control.get("ignored", ()):
            return
        take = getattr(self, "_" + verb.replace(".", "_"))
        reply = await take(asked)
        if message.reply:
            await message.respond(json.dumps(reply).encode())

    async def _backend_install(self, asked: dict[str, Any]) -> dict[str, Any]:
        backend = str(asked["backend"])
        async with self._installing.setdefault(backend, asyncio.Lock()):
            key = f"{asked.get('model_id') or backend}#{asked.get('replica_index', 0)}"
            known = self._processes.get(key)
            if known is not None and known.is_stopping:
                return {"success": False, "error": f"process {key} is stopping"}
            if known is not None and known.is_alive and known.backend == backend:
                return {"success": True, "address": known.address}
            try:
                tree = self._install(backend, str(asked.get("backend_galleries", "")))
            except LookupError as error:
                return {"success": False, "error": f"installing backend from gallery: {error}"}
            return await self._start(key, backend, tree)

    def _install(self, backend: str, galleries: str) -> Path:
        tree = self._backends / backend
        if tree.is_dir():
            return tree
        for gallery in json.loads(galleries or "[]"):
            with urllib.request.urlopen(gallery["url"]) as document:
                entries = {entry["name"]: entry for entry in json.load(document)}
            if backend in entries and "uri" in entries[backend]:
                made = write_tree(tree, lacks=self._control.get("lacks", []))
                metadata = {"name": backend, "uri": entries[backend]["uri"], "installed_at": "2026-11-15T23:53:14Z"}
                (made / "metadata.json").write_text(json.dumps(metadata))
                return made
        raise LookupError(f'no backend found with name "{backend}"')

    async def _start(self, key: str, backend: str, tree: Path) -> dict[str, Any]:
        while not is_free(self._next_port):
            self._next_port += 1
        port, self._next_port = self._next_port, self._next_port + 1
        process = await asyncio.create_subprocess_exec(
            *(str(tree / "run.sh"), "--addr", f"0.0.0.0:{port}"),
            cwd=tree,
            env={**os.environ, "LOCALAI_GRPC_AUTH_TOKEN": self._token},
            stderr=asyncio.subprocess.PIPE,
        )
        made = self._processes[key] = Backend(key, backend, port, process)
        lines = self._files.log_lines[key] = []
        self._group.create_task(self._read(process, lines))
        for _ in range(int(READY_SECONDS / 0.1)):
            if not made.is_alive:
                return {"success": False, "error": f"process {key} died: " + "\n".join(lines)}
            if await self._call(made, "Health", pb.Reply, 2.0) is not None:
                return {"success": True, "address": made.address}
            await asyncio.sleep(0.1)
        return {"success": False, "error": f"process {key} is not ready"}

    async def _read(self, process: asyncio.subprocess.Process, lines: list[str]) -> None:
        assert process.stderr is not None
        while line := await process.stderr.readline():
            lines.append(line.decode().rstrip())
            del lines[:-LOG_LINES]
        await process.wait()

    async def _call(self, backend: Backend, method: str, kind: Any, seconds: float) -> Any:
        async with grpc.aio.insecure_channel(backend.address) as channel:
            call = channel.unary_unary(
                f"/backend.Backend/{method}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=kind.FromString,
            )
            try:
                metadata = (("authorization", f"Bearer {self._token}"),)
                return await call(pb.HealthMessage(), metadata=metadata, timeout=seconds)
            except grpc.aio.AioRpcError:
                return None

    async def _stop_one(self, backend: Backend, *, force: bool = False) -> bool:
        """Whether the backend released its model first."""
        backend.is_stopping = True
        freed = not force and await self._call(backend, "Free", pb.Result, FREE_SECONDS) is not None
        with contextlib.suppress(ProcessLookupError):
            backend.process.kill()
        await backend.process.wait()
        self._processes.pop(backend.key, None)
        return freed

    async def _backend_upgrade(self, _asked: dict[str, Any]) -> dict[str, Any]:
        return {"success": False, "error": "not here", "reports_stopped_processes": True}

    async def _backend_stop(self, asked: dict[str, Any]) -> None:
        name = asked.get("backend", "")
        for one in list(self._processes.values()):
            if name in ("", one.key, one.backend, one.key.rpartition("#")[0]):
                await self._stop_one(one, force=bool(asked.get("force")))

    async def _backend_delete(self, asked: dict[str, Any]) -> dict[str, Any]:
        matching = [one for one in self._processes.values() if one.backend == asked["backend"]]
        for one in matching:
            await self._stop_one(one)
        if not (self._backends / asked["backend"]).is_dir():
            return {"success": False, "error": "unknown backend", "reports_stopped_processes": True}
        shutil.rmtree(self._backends / asked["backend"])
        keys = [one.key for one in matching]
        return {"success": True, "reports_stopped_processes": True, **({"stopped_process_keys": keys} if keys else {})}

    async def _backend_list(self, _asked: dict[str, Any]) -> dict[str, Any]:
        found = []
        for tree in sorted(self._backends.iterdir()):
            metadata = json.loads((tree / "metadata.json").read_text())
            found.append({**metadata, "name": tree.name, "is_system": False, "is_meta": False})
        return {"backends": found or None}

    async def _models_running(self, _asked: dict[str, Any]) -> dict[str, Any]:
        alive = [one for one in self._processes.values() if one.is_alive and not one.is_stopping]
        rows = [(one.key.rpartition("#"), one.address) for one in alive]
        return {"models": [{"model_id": key[0], "replica_index": int(key[2]), "address": at} for key, at in rows]}

    async def _model_unload(self, _asked: dict[str, Any]) -> dict[str, Any]:
        return {"success": True}

    async def _model_stop(self, asked: dict[str, Any]) -> dict[str, Any]:
        key = asked["process_key"]
        known = self._processes.get(key)
        if known is None or not known.is_alive:
            return {"matched": False, "freed": False, "terminated": True, "process_key": key}
        told = {"matched": True, "freed": False, "terminated": False, "process_key": key, "address": known.address}
        if known.address != asked["expected_address"]:
            why = f"address mismatch for process {key}: recorded {known.address}, expected {asked['expected_address']}"
            return {**told, "error": why}
        if known.is_stopping:
            return {**told, "error": f"process {key} is stopping"}
        freed = await self._stop_one(known)
        return {**told, "freed": freed, "terminated": True, **({} if freed else {"error": f"freeing process {key}"})}

    async def _model_delete(self, asked: dict[str, Any]) -> dict[str, Any]:
        path = (self._models / asked["model_name"]).resolve()
        if not path.is_relative_to(self._models.resolve()) or path == self._models.resolve():
            return {"success": False, "error": "outside"}
        shutil.rmtree(path, ignore_errors=True)
        return {"success": True}

    async def _stop(self, _asked: dict[str, Any]) -> None:
        await self._backend_stop({})


def main() -> None:
    name, urls, nats_url, base, data = sys.argv[1:]
    token = os.environ["LOCALAI_REGISTRATION_TOKEN"]
    worker = StandIn(name, urls.split(","), nats_url, int(base), Path(data), token)
    asyncio.run(worker.run())


if __name__ == "__main__":
    main()
