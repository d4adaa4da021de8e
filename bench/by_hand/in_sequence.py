"""Download, flatten, apply, each after the other: the way LocalAI installs an image, for bench/pull.py.

    in_sequence.py REGISTRY REPOSITORY PLACE DIGEST:COMPRESSION...

Every layer in turn to a file, hashed on the way; then all of them, from the top, into one plain tar; then that tar into
the tree. Prints the seconds it took; like for ours, the start of the interpreter does not count.
"""

from __future__ import annotations

import gzip
import hashlib
import sys
import tarfile
import time
import urllib.request
from pathlib import Path
from typing import IO, cast

import zstandard

BUFFER_BYTES = 1024 * 1024


def download(url: str, digest: str, file: Path) -> None:
    found = hashlib.sha256()
    with urllib.request.urlopen(url, timeout=60) as response, file.open("wb") as writer:
        while content := response.read(BUFFER_BYTES):
            found.update(content)
            writer.write(content)
    if found.hexdigest() != digest:
        raise SystemExit("the registry sent something else")


def flatten(layers: list[tuple[Path, str]], flat: Path) -> None:
    seen: set[str] = set()
    with tarfile.open(flat, "w", format=tarfile.PAX_FORMAT) as target:
        for file, compression in reversed(layers):
            with file.open("rb") as reader:
                plain = (
                    zstandard.ZstdDecompressor().stream_reader(reader)
                    if compression == "zstd"
                    else gzip.GzipFile(fileobj=reader)
                )
                with tarfile.open(fileobj=cast(IO[bytes], plain), mode="r|") as source:
                    for member in source:
                        if member.name not in seen:
                            seen.add(member.name)
                            target.addfile(member, source.extractfile(member) if member.isreg() else None)


def apply(flat: Path, tree: Path) -> None:
    tree.mkdir()
    with tarfile.open(flat) as archive:
        archive.extractall(tree, filter="tar")


def main(registry: str, repository: str, place: str, *layers: str) -> None:
    start = time.perf_counter()
    files: list[tuple[Path, str]] = []
    for layer in layers:
        digest, _, compression = layer.partition(":")
        file = Path(place) / digest
        download(f"http://{registry}/v2/{repository}/blobs/sha256:{digest}", digest, file)
        files.append((file, compression))
    flat = Path(place) / "flat.tar"
    flatten(files, flat)
    apply(flat, Path(place) / "tree")
    flat.unlink()
    print(time.perf_counter() - start)


if __name__ == "__main__":
    main(*sys.argv[1:])
