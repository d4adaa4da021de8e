"""Models: a name that the API serves, the backend that runs it, the files it needs and the options of its start.

`revision` covers everything that matters to a running replica, so replicas of different revisions are never mixed up.
"""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Struct


class ModelFile(Struct, frozen=True, omit_defaults=True):
    """One file of a model: its source and its digest."""

    name: str
    uri: str
    sha256: str
    size_bytes: int = 0
    requirement: str = ""  # for `pypi:` files: the pinned and hashed requirement of the package


class ModelOptions(Struct, frozen=True, omit_defaults=True):
    """Options of a replica's start; 0 and "" leave the choice to the engine or the worker."""

    context_size: int = 0
    parallel: int = 0  # requests that one replica serves at the same time
    threads: int = 0
    system_prompt: str = ""  # for the terminal chat; never added to an API request


class Model(Struct, frozen=True, omit_defaults=True, kw_only=True):
    name: str
    backend: str
    files: tuple[ModelFile, ...]
    options: ModelOptions = ModelOptions()
    description: str = ""
    license: str = ""
    replicas: int = 1

    @property
    def revision(self) -> str:
        """Changes if and only if a running replica would have to be replaced."""
        described = msgspec.json.encode([self.backend, self.files, self.options])
        return hashlib.sha256(described).hexdigest()[:16]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


GIB = 1024**3
# LocalAI's limits for loading a model into a running engine: disks and buses differ, so the size decides.
LOAD_SECONDS, LOAD_SECONDS_PER_GIB, MAX_LOAD_SECONDS = 300.0, 20.0, 6 * 3600.0


def load_seconds(size_bytes: int) -> float:
    """How long an engine may take to load files of this size."""
    return min(MAX_LOAD_SECONDS, LOAD_SECONDS + LOAD_SECONDS_PER_GIB * size_bytes / GIB)


class HeldModel(Struct, frozen=True, omit_defaults=True):
    """A model whose verified files a node holds; without digests if its files are incomplete."""

    name: str
    sha256: tuple[str, ...]
    generation: int = 0


def holds(held: tuple[HeldModel, ...], model: Model) -> bool:
    wanted = {file.sha256 for file in model.files}
    return any(one.name == model.name and wanted <= set(one.sha256) for one in held)
