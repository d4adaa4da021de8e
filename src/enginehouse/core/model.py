"""Models: a name that the API serves, the backend that runs it, the files it needs and the options of its start.

`revision` covers everything that matters to a running replica, so replicas of different revisions are never mixed up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from enginehouse.core.load_options import ModelPaths, model_options
from enginehouse.core.model_config import ModelConfig, read_config


class ModelFile(Struct, frozen=True, omit_defaults=True):
    """One file of a model: its source and its digest."""

    name: str
    uri: str
    sha256: str
    size_bytes: int = 0
    requirement: str = ""  # for `pypi:` files: the pinned and hashed requirement of the package
    credential: str = ""  # the name of the credential for its source, never the value


class PinnedFile(Struct, frozen=True):
    """The digest that a worker found for a file whose source gave none."""

    name: str
    sha256: str
    size_bytes: int = 0


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
    cache_bytes_per_token: int = 0  # keys and values of one token, from the header of the weights; 0 if unknown
    # The configuration in the form of LocalAI's model YAML, as imported: keys that have no effect here are kept.
    config: dict[str, Any] = {}
    # A server that runs elsewhere and speaks OpenAI's API, as host:port; such a model has no files and no replicas.
    endpoint: str = ""
    credential: str = ""  # the name of the credential with the key of the endpoint
    # Another model, which answers for this name; such a model has no files and no replicas either.
    alias: str = ""

    @property
    def runs_here(self) -> bool:
        """Whether it has replicas on nodes of the cluster."""
        return not self.endpoint and not self.alias

    @property
    def revision(self) -> str:
        """Changes if and only if a running replica would have to be replaced."""
        described = [self.backend, self.files, self.options, *([self.config] if self.config else [])]
        described += [self.endpoint, self.credential] if self.endpoint else []
        described += [self.alias] if self.alias else []
        return hashlib.sha256(msgspec.json.encode(described, order="sorted")).hexdigest()[:16]

    @property
    def configuration(self) -> dict[str, Any]:
        """The stored configuration, completed from the other fields where it says nothing."""
        options, parameters = self.options, self.config.get("parameters")
        named = [f"parallel:{options.parallel}"] if options.parallel else []
        completed: dict[str, Any] = {
            **({"context_size": options.context_size} if options.context_size else {}),
            **({"threads": options.threads} if options.threads else {}),
            **({"options": named} if named else {}),
            **self.config,
            "name": self.name,
            "backend": self.backend,
        }
        own = parameters if isinstance(parameters, dict) else {}
        first = self.files[0].name if self.files else ""
        return {**completed, "parameters": {**own, "model": own.get("model") or first}}

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class ServedModel(Struct, frozen=True, eq=False):
    """What a request to an engine of LocalAI needs of its model. Equal only to itself: one per model and revision."""

    name: str
    identity: str  # the engine refuses requests for another one
    config: ModelConfig


def read_model(definition: str) -> Model:
    return msgspec.json.decode(definition, type=Model)


def served_model(definition: str) -> ServedModel:
    model = read_model(definition)
    config = served_config(model)
    return ServedModel(name=model.name, identity=config.parameters.model, config=config)


def served_config(model: Model) -> ModelConfig:
    """The typed view of a model's configuration. Warnings are for the person who stores it, not for its use."""
    config, _ = read_config(model.configuration)
    return config


def parallel_requests(model: Model) -> int:
    """How many requests one replica answers at the same time; 0 if nothing says so."""
    named = dict(one.partition(":")[::2] for one in served_config(model).options)
    given = named.get("parallel") or named.get("n_parallel") or ""
    return model.options.parallel or (int(given) if given.isdecimal() and len(given) < 4 else 0)


def load_options(model: Model, paths: ModelPaths) -> dict[str, Any]:
    """The fields of the request that loads a model whose files are in the directory of `paths`, which also has what
    suits its file and machine where the configuration says nothing.
    """
    config = served_config(model)
    path = f"{paths.directory}/{main_file(model, config)}".rstrip("/")
    return model_options(config, msgspec.structs.replace(paths, model_file=path))


def main_file(model: Model, config: ModelConfig) -> str:
    """The file that an engine opens, relative to the model's directory; "" if it reads the directory itself.

    Companions, such as a projector, come after it. Of a model in several parts, engines open the first part.
    """
    names = [file.name for file in model.files]
    if config.parameters.model in names:
        return config.parameters.model
    own = [name for name in names if name not in (config.mmproj, config.draft_model)]
    return own[0] if len(own) == 1 or (own and own[0].endswith(".gguf")) else ""


GIB = 1024**3
# LocalAI's limits for loading a model into a running engine: disks and buses differ, so the size decides.
LOAD_SECONDS, LOAD_SECONDS_PER_GIB, MAX_LOAD_SECONDS = 300.0, 20.0, 6 * 3600.0


def load_seconds(size_bytes: int) -> float:
    """How long an engine may take to load files of this size."""
    return min(MAX_LOAD_SECONDS, LOAD_SECONDS + LOAD_SECONDS_PER_GIB * size_bytes / GIB)


def pinned(model: Model, pins: Iterable[PinnedFile]) -> Model:
    """The model with the digests that a worker found; files that have one keep it."""
    found = {pin.name: pin for pin in pins}
    files = tuple(
        msgspec.structs.replace(
            file, sha256=found[file.name].sha256, size_bytes=file.size_bytes or found[file.name].size_bytes
        )
        if not file.sha256 and file.name in found
        else file
        for file in model.files
    )
    return msgspec.structs.replace(model, files=files)


def contradiction(model: Model, pins: Iterable[PinnedFile]) -> str:
    """The name of a file for which a worker found another digest than the model has; "" if there is none."""
    known = {file.name: file.sha256 for file in model.files if file.sha256}
    return next((pin.name for pin in pins if known.get(pin.name, pin.sha256) != pin.sha256), "")


class HeldModel(Struct, frozen=True, omit_defaults=True):
    """A model whose verified files a node holds; without digests if its files are incomplete."""

    name: str
    sha256: tuple[str, ...]
    generation: int = 0


def holds(held: tuple[HeldModel, ...], model: Model) -> bool:
    wanted = {file.sha256 for file in model.files}
    return any(one.name == model.name and wanted <= set(one.sha256) for one in held)
