"""A server that answers as Hugging Face and as a registry do, on loopback, and the sources that ask it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from tests.fetch.faulty import Faulty, faulty
from tests.fetch.pulling import FAST, LOOPBACK

from enginehouse.fetch.http.client import Client
from enginehouse.fetch.models.credentials import ModelCredentials
from enginehouse.fetch.models.sources import ModelFinder, SourceOptions
from enginehouse.fetch.registry.requests import Registries

COMMIT = "c" * 40


class Hub:
    def __init__(self, server: Faulty, sources: ModelFinder) -> None:
        self.server = server
        self.sources = sources

    def add_repository(self, name: str, files: Mapping[str, bytes], *, revision: str = "main", **more: object) -> None:
        """List a repository as the hub does: files of LFS with their sha256, small ones without."""
        siblings = []
        for path, content in files.items():
            one: dict[str, object] = {"rfilename": path, "size": len(content), "blobId": "b" * 40}
            if path.endswith((".gguf", ".safetensors", ".bin")):
                one["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 135}
            siblings.append(one)
            self.server.files[f"/{name}/resolve/{COMMIT}/{path}"] = content
        listing = {"id": name, "sha": COMMIT, "private": False, "siblings": siblings, **more}
        self.server.files[f"/api/models/{name}/revision/{revision}"] = json.dumps(listing).encode()

    def add_manifest(
        self, repository: str, tag: str, layers: list[tuple[str, bytes, dict[str, str]]], media_type: str = ""
    ) -> None:
        described = []
        for kind, content, notes in layers:
            digest = "sha256:" + hashlib.sha256(content).hexdigest()
            self.server.files[f"/v2/{repository}/blobs/{digest}"] = content
            one: dict[str, object] = {"mediaType": kind, "digest": digest, "size": len(content)}
            described.append({**one, **({"annotations": notes} if notes else {})})
        config = b"{}"
        digest = "sha256:" + hashlib.sha256(config).hexdigest()
        manifest = {
            "schemaVersion": 2,
            "mediaType": media_type or "application/vnd.docker.distribution.manifest.v2+json",
            "config": {"mediaType": "application/vnd.oci.empty.v1+json", "digest": digest, "size": len(config)},
            "layers": described,
        }
        self.server.files[f"/v2/{repository}/manifests/{tag}"] = json.dumps(manifest).encode()


@asynccontextmanager
async def hub(credentials: Mapping[str, str] = {}) -> AsyncIterator[Hub]:
    client = Client(LOOPBACK, stall_seconds=5.0)
    async with faulty("") as server:
        options = SourceOptions(huggingface=server.url, ollama=server.address, patience=FAST)
        registries = Registries(LOOPBACK, patience=FAST)
        yield Hub(server, ModelFinder(client, registries, ModelCredentials(credentials, {}), options))
        await client.close()
