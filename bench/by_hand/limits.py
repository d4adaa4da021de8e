"""What the machine can do at all: each step of a pull alone, as fast as it goes here."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import zstandard
from bench.by_hand.images import Image
from isal import isal_zlib

_BUFFER_BYTES = 1024 * 1024


def slowest(image: Image, url: str, place: Path) -> tuple[str, float]:
    """The name and the seconds of the slowest step; each alone, with one core where it has only one."""
    steps: list[tuple[str, Callable[[], None]]] = [
        ("loopback HTTP", lambda: _download(image, url)),
        ("sha256", lambda: _hash(image)),
        ("inflating", lambda: _inflate(image)),
        ("writing the files", _writer(image, place)),
    ]
    measured: list[tuple[str, float]] = []
    for name, step in steps:
        start = time.perf_counter()
        step()
        measured.append((name, time.perf_counter() - start))
    print("  limits: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in measured))
    return max(measured, key=lambda one: one[1])


def disk_bytes(*trees: Path) -> int:
    """What trees take together, each file once however many names it has."""
    seen: set[int] = set()
    total = 0
    for tree in trees:
        for directory, below, names in os.walk(tree):
            for name in (*below, *names):
                status = os.lstat(os.path.join(directory, name))
                if status.st_ino not in seen:
                    seen.add(status.st_ino)
                    total += status.st_blocks * 512
    return total


def _download(image: Image, url: str) -> None:
    for layer in image.layers:
        subprocess.run(["curl", "-sf", "-o", "/dev/null", f"{url}/blobs/{layer.digest}"], check=True)


def _hash(image: Image) -> None:
    """Compressed and plain bytes: both digests are checked."""
    buffer = bytes(_BUFFER_BYTES)
    for layer in image.layers:
        digest = hashlib.sha256()
        for _ in range((layer.size_bytes + layer.plain_bytes) // _BUFFER_BYTES + 1):
            digest.update(buffer)


def _inflate(image: Image) -> None:
    buffer = bytearray(_BUFFER_BYTES)
    for layer in image.layers:
        with (image.directory / "blobs" / "sha256" / layer.digest[7:]).open("rb") as file:
            if layer.compression == "zstd":
                reader = zstandard.ZstdDecompressor().stream_reader(file)
                while reader.readinto(buffer):
                    pass
            else:
                member = isal_zlib.decompressobj(31)
                while content := file.read(_BUFFER_BYTES):
                    member.decompress(content)


def _writer(image: Image, place: Path) -> Callable[[], None]:
    """Only the kernel's part: the directories are there, the contents are zeros in memory. As many calls as needed."""
    sizes: list[tuple[str, int]] = []
    for layer in image.layers:
        with (image.directory / "blobs" / "sha256" / layer.digest[7:]).open("rb") as file:
            plain = zstandard.ZstdDecompressor().stream_reader(file) if layer.compression == "zstd" else file
            mode: Literal["r|", "r|gz"] = "r|" if layer.compression == "zstd" else "r|gz"
            with tarfile.open(fileobj=plain, mode=mode) as archive:
                sizes += [(str(place / member.name), member.size) for member in archive]
    for directory in {os.path.dirname(path) for path, _ in sizes}:
        os.makedirs(directory, exist_ok=True)
    zeros = memoryview(bytes(64 * 1024 * 1024 + 64))

    def write() -> None:
        for path, size in sizes:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            os.write(descriptor, zeros[:size])
            os.close(descriptor)

    return write
