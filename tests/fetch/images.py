"""Images for tests, written as OCI layout directories: any layers, platforms and compression.

`umoci_image` makes one with umoci instead, for trees that must be exactly what a reference tool makes.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import zstandard

Compression = Literal["none", "gzip", "zstd"]
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_SUFFIX: dict[Compression, str] = {"none": "", "gzip": "+gzip", "zstd": "+zstd"}


@dataclass(frozen=True)
class Blob:
    """One blob of a layout and what it says of itself."""

    digest: str
    size_bytes: int
    diff_id: str = ""


@dataclass(frozen=True)
class Image:
    """One platform's image in a layout directory. `document` is the manifest as it is stored."""

    directory: Path
    digest: str
    document: bytes
    config: Blob
    layers: tuple[Blob, ...]
    platform: str


def digest_of(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def tar_of(files: Mapping[str, bytes]) -> bytes:
    """A tar whose members end as executable if they are called `run.sh`; equal files give equal bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), 1_700_000_000
            member.mode = 0o755 if name.endswith("run.sh") else 0o644
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def compress(content: bytes, compression: Compression) -> bytes:
    if compression == "gzip":
        return gzip.compress(content, compresslevel=1, mtime=0)
    if compression == "zstd":
        return zstandard.ZstdCompressor(level=1).compress(content)
    return content


def put_blob(directory: Path, content: bytes) -> Blob:
    """A blob of the layout in `directory`, which is made if it is not there."""
    digest = digest_of(content)
    blobs = directory / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    (directory / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    (blobs / digest.removeprefix("sha256:")).write_bytes(content)
    return Blob(digest, len(content))


def write_image(
    directory: Path,
    layers: Sequence[Mapping[str, bytes] | bytes],
    *,
    compression: Compression = "gzip",
    platform: str = "linux/amd64",
) -> Image:
    """An image whose layers are the given files (or tars); it becomes the layout's only entry, see `write_index`."""
    blobs = []
    for layer in layers:
        tar = layer if isinstance(layer, bytes) else tar_of(layer)
        blob = put_blob(directory, compress(tar, compression))
        blobs.append(Blob(blob.digest, blob.size_bytes, digest_of(tar)))
    system, architecture = platform.split("/")[:2]
    diff_ids = [blob.diff_id for blob in blobs]
    config = put_blob(
        directory,
        json.dumps(
            {"os": system, "architecture": architecture, "rootfs": {"type": "layers", "diff_ids": diff_ids}}
        ).encode(),
    )
    document = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": {"mediaType": OCI_CONFIG, "digest": config.digest, "size": config.size_bytes},
            "layers": [
                {"mediaType": OCI_LAYER + _SUFFIX[compression], "digest": blob.digest, "size": blob.size_bytes}
                for blob in blobs
            ],
        }
    ).encode()
    manifest = put_blob(directory, document)
    image = Image(directory, manifest.digest, document, config, tuple(blobs), platform)
    _write_entries(directory, [(OCI_MANIFEST, manifest)])
    return image


def write_index(directory: Path, images: Sequence[Image]) -> Blob:
    """An index over images of the same directory; it becomes the layout's only entry."""
    children = []
    for image in images:
        system, architecture = image.platform.split("/")[:2]
        children.append(
            {
                "mediaType": OCI_MANIFEST,
                "digest": image.digest,
                "size": len(image.document),
                "platform": {"os": system, "architecture": architecture},
            }
        )
    index = put_blob(
        directory, json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": children}).encode()
    )
    _write_entries(directory, [(OCI_INDEX, index)])
    return index


async def umoci_image(directory: Path, *trees: Path, tag: str = "latest") -> None:
    """A layout made by umoci: one layer per tree, the tree's content at the root."""
    await run("umoci", "init", "--layout", str(directory))
    await run("umoci", "new", "--image", f"{directory}:{tag}")
    for tree in trees:
        await run("umoci", "insert", "--rootless", "--image", f"{directory}:{tag}", str(tree), "/")


async def run(*command: str, limit_seconds: float = 60.0) -> bytes:
    """What a tool printed; it fails the test with the tool's own words."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(limit_seconds):
            output, told = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    assert process.returncode == 0, f"{command[0]}: {told.decode(errors='replace')}"
    return output


def _write_entries(directory: Path, entries: Sequence[tuple[str, Blob]]) -> None:
    manifests = [
        {
            "mediaType": kind,
            "digest": blob.digest,
            "size": blob.size_bytes,
            "annotations": {"org.opencontainers.image.ref.name": "latest"},
        }
        for kind, blob in entries
    ]
    (directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))
