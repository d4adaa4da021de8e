"""A real registry for tests: Debian's docker-registry on a free port of loopback, plain or with basic auth.

    async with running_registry(tmp_path) as registry:
        image = write_image(tmp_path / "layout", [{"run.sh": b"..."}])
        await registry.push(image.directory, "backends/one:latest")
        registry.reference("backends/one:latest")     # 127.0.0.1:PORT/backends/one:latest

The process is ended by its own id when the block ends.
"""

from __future__ import annotations

import asyncio
import base64
import re
import shutil
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.fetch.images import run

USER, PASSWORD = "reader", "secret"
# PASSWORD by bcrypt at its lowest cost: docker-registry takes no other kind.
_PASSWORD_LINE = f"{USER}:$2b$04$J.Posx92XnsSd3GunaANN.DdRFxpfikJEApF7VjO2XX7w.J65bqxO\n"
_LISTENING = re.compile(r"listening on (127\.0\.0\.1:\d+)")
_START_SECONDS = 20.0

_CONFIGURATION = """
version: 0.1
log: {level: info, accesslog: {disabled: true}}
storage:
  filesystem: {rootdirectory: STORAGE}
  delete: {enabled: true}
http:
  addr: 127.0.0.1:0
"""
_BASIC = """
auth:
  htpasswd: {realm: tests, path: PASSWORDS}
"""


@dataclass(frozen=True)
class Registry:
    """`address` is host:port. With `auth`, USER and PASSWORD are asked for."""

    address: str
    auth: bool
    storage: Path
    pid: int = field(default=0)

    def reference(self, name: str) -> str:
        return f"{self.address}/{name}"

    async def push(self, layout: Path, name: str) -> str:
        """Copies the only entry of an OCI layout directory, all platforms, digests kept; gives the digest it got."""
        copied = layout.parent / f".pushed-{self.address.rpartition(':')[2]}-{re.sub(r'[^A-Za-z0-9]', '-', name)}"
        credentials = ["--dest-creds", f"{USER}:{PASSWORD}"] if self.auth else []
        await run(
            "skopeo",
            "--insecure-policy",
            "copy",
            "--quiet",
            "--all",
            "--preserve-digests",
            "--dest-tls-verify=false",
            "--digestfile",
            str(copied),
            *credentials,
            f"oci:{layout}",
            f"docker://{self.reference(name)}",
        )
        return copied.read_text().strip()

    async def put_manifest(self, repository: str, name: str, document: bytes, media_type: str) -> None:
        """Stores a manifest as it is, as far as docker-registry accepts it."""
        await asyncio.to_thread(self._send, f"/v2/{repository}/manifests/{name}", document, media_type)

    def _send(self, path: str, content: bytes, media_type: str) -> None:
        request = urllib.request.Request(f"http://{self.address}{path}", content, method="PUT")
        request.add_header("content-type", media_type)
        if self.auth:
            request.add_header("authorization", basic(USER, PASSWORD))
        with urllib.request.urlopen(request, timeout=20) as response:
            assert response.status == 201


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@asynccontextmanager
async def running_registry(directory: Path, *, auth: bool = False) -> AsyncIterator[Registry]:
    """A fresh registry that keeps its files under `directory`."""
    program = shutil.which("docker-registry")
    assert program, "docker-registry is missing; install the Debian package docker-registry"
    place = directory / ("registry-auth" if auth else "registry")
    storage = place / "storage"
    storage.mkdir(parents=True)
    configuration, log = place / "config.yml", place / "log"
    (place / "passwords").write_text(_PASSWORD_LINE)
    text = (_CONFIGURATION + (_BASIC if auth else "")).replace("STORAGE", str(storage))
    configuration.write_text(text.replace("PASSWORDS", str(place / "passwords")))
    with log.open("wb") as writer:
        process = await asyncio.create_subprocess_exec(
            program,
            "serve",
            str(configuration),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
            env={"PATH": "/usr/bin:/bin", "OTEL_TRACES_EXPORTER": "none"},
        )
    try:
        yield Registry(await _listening(log, process), auth, storage, process.pid)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _listening(log: Path, process: asyncio.subprocess.Process) -> str:
    async with asyncio.timeout(_START_SECONDS):
        while not (found := _LISTENING.search(log.read_text(errors="replace"))):
            assert process.returncode is None, log.read_text(errors="replace")
            await asyncio.sleep(0.01)
    return found[1]
