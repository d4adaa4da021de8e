"""Images of realistic content for benchmarks, written as OCI layout directories and pushed to a registry.

Content comes from this machine: Python sources and compiled modules of the interpreter and its packages for a sixth of
the bytes, shared libraries for the rest. That gives some ten files per MiB, which is what images of Python engines
hold; those of engines in C++ hold far fewer. Every file gets bytes of its own at its end, so that nothing can be shared
by accident.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import subprocess
import sysconfig
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import zstandard

LARGE_BYTES = 512 * 1024
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@dataclass(frozen=True)
class File:
    path: str
    source: str
    suffix: bytes
    size_bytes: int

    def content(self) -> bytes:
        return Path(self.source).read_bytes() + self.suffix


@dataclass(frozen=True)
class Layer:
    digest: str
    size_bytes: int
    diff_id: str
    plain_bytes: int
    compression: str


@dataclass(frozen=True)
class Image:
    directory: Path
    layers: tuple[Layer, ...]

    @property
    def size_bytes(self) -> int:
        return sum(layer.size_bytes for layer in self.layers)


def choose_files(total_bytes: int, seed: int) -> list[File]:
    """Files in the order of their directories, as archives have them."""
    small, large = _sources(max(total_bytes // 16, 4 * LARGE_BYTES))
    if not small or not large:
        raise SystemExit("this machine has too few files to make an image of")
    chosen: list[File] = []
    for sources, share in ((small, total_bytes // 6), (large, total_bytes - total_bytes // 6)):
        order = _by_directory(sources, seed)
        done = turn = 0
        while done < share:
            for path, size in order:
                if done >= share:
                    break
                suffix = f"\n#{seed}.{turn}.{len(chosen)}\n".encode()
                name = f"lib/{turn}{path}"
                chosen.append(File(name, path, suffix, size + len(suffix)))
                done += size
            turn += 1
    return sorted(chosen, key=lambda file: file.path)


def rebuilt(files: Sequence[File]) -> list[File]:
    """The same files with other contents, as a new build of some libraries would have."""
    return [File(file.path, file.source, file.suffix[::-1], file.size_bytes) for file in files]


def write_image(directory: Path, layers: Sequence[Sequence[File]], compression: str) -> Image:
    """One layer per list of files; the first one also holds the run file. Layers are compressed on all cores."""
    _begin(directory)
    count = len(layers)
    firsts = [number == 0 for number in range(count)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(_write_layer, [directory] * count, layers, [compression] * count, firsts))
    return _finish(Image(directory, tuple(made)))


def with_another_end(directory: Path, image: Image, files: Sequence[File]) -> Image:
    """The image with another last layer; the others are taken as they are."""
    _begin(directory)
    for layer in image.layers[:-1]:
        name = layer.digest.removeprefix("sha256:")
        os.link(image.directory / "blobs" / "sha256" / name, directory / "blobs" / "sha256" / name)
    last = _write_layer(directory, files, image.layers[-1].compression, False)
    return _finish(Image(directory, (*image.layers[:-1], last)))


def _begin(directory: Path) -> None:
    (directory / "blobs" / "sha256").mkdir(parents=True)
    (directory / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')


def _finish(image: Image) -> Image:
    _write_documents(image)
    return image


def push(image: Image, reference: str) -> None:
    subprocess.run(
        [
            *("skopeo", "--insecure-policy", "copy", "--quiet", "--preserve-digests", "--dest-tls-verify=false"),
            *(f"oci:{image.directory}", f"docker://{reference}"),
        ],
        check=True,
    )


def split(files: Sequence[File], count: int) -> list[list[File]]:
    """`count` runs of neighbours of about the same size."""
    total, done = sum(file.size_bytes for file in files), 0
    parts: list[list[File]] = [[] for _ in range(count)]
    for file in files:
        parts[min(count - 1, done * count // total)].append(file)
        done += file.size_bytes
    return parts


@cache
def _found() -> tuple[tuple[str, int], ...]:
    libraries = f"/usr/lib/{sysconfig.get_config_var('MULTIARCH') or ''}"
    roots = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), libraries)
    return tuple(sorted({file for root in roots for file in _regular_files(root)}))


def _sources(largest_bytes: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    small = [file for file in _found() if file[1] < LARGE_BYTES]
    return small, [file for file in _found() if LARGE_BYTES <= file[1] <= largest_bytes]


def _by_directory(sources: list[tuple[str, int]], seed: int) -> list[tuple[str, int]]:
    """Directories in any order, each as a whole: a tree has many more files than directories."""
    found: dict[str, list[tuple[str, int]]] = {}
    for path, size in sources:
        found.setdefault(os.path.dirname(path), []).append((path, size))
    directories = sorted(found)
    random.Random(seed).shuffle(directories)
    return [file for directory in directories for file in found[directory]]


def _regular_files(root: str) -> Iterator[tuple[str, int]]:
    with os.scandir(root) as found:
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                yield from _regular_files(entry.path)
            elif entry.is_file(follow_symlinks=False) and os.access(entry.path, os.R_OK):
                yield entry.path, entry.stat().st_size


def _write_layer(directory: Path, files: Sequence[File], compression: str, is_first: bool) -> Layer:
    tar = directory / f"{os.getpid()}.tar"
    with tar.open("wb") as writer, tarfile.open(fileobj=writer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        if is_first:
            _add(archive, "run.sh", b"#!/bin/sh\nexit 0\n", 0o755)
        for file in files:
            _add(archive, file.path, file.content(), 0o755 if ".so" in file.path else 0o644)
    packed = directory / f"{os.getpid()}.packed"
    _compress(tar, packed, compression)
    digest = _sha256(packed)
    layer = Layer(digest, packed.stat().st_size, _sha256(tar), tar.stat().st_size, compression)
    packed.rename(directory / "blobs" / "sha256" / digest.removeprefix("sha256:"))
    tar.unlink()
    return layer


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = len(content), mode, 1_700_000_000
    archive.addfile(member, io.BytesIO(content))


def _compress(tar: Path, packed: Path, compression: str) -> None:
    with tar.open("rb") as reader, packed.open("wb") as writer:
        if compression == "zstd":
            zstandard.ZstdCompressor(level=3).copy_stream(reader, writer, size=tar.stat().st_size)
        else:
            with gzip.GzipFile(fileobj=writer, mode="wb", compresslevel=6, mtime=0, filename="") as file:
                while content := reader.read(1024 * 1024):
                    file.write(content)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def _write_documents(image: Image) -> None:
    rootfs = {"type": "layers", "diff_ids": [layer.diff_id for layer in image.layers]}
    config = _put(image.directory, {"os": "linux", "architecture": "amd64", "config": {}, "rootfs": rootfs})
    layers = [
        {"mediaType": f"{_LAYER}+{layer.compression}", "digest": layer.digest, "size": layer.size_bytes}
        for layer in image.layers
    ]
    config["mediaType"] = "application/vnd.oci.image.config.v1+json"
    manifest = _put(image.directory, {"schemaVersion": 2, "mediaType": _MANIFEST, "config": config, "layers": layers})
    manifest |= {"mediaType": _MANIFEST, "annotations": {"org.opencontainers.image.ref.name": "latest"}}
    (image.directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))


def _put(directory: Path, document: dict[str, object]) -> dict[str, object]:
    content = json.dumps(document).encode()
    digest = hashlib.sha256(content).hexdigest()
    (directory / "blobs" / "sha256" / digest).write_bytes(content)
    return {"digest": f"sha256:{digest}", "size": len(content)}
