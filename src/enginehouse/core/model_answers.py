"""Bodies and answers of the routes that define models: what the API takes and sends, and the command line reads.

Bodies refuse unknown fields. Fields of answers have defaults, so that commands can read those of other versions.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from enginehouse.core.model import ModelFile, ModelOptions


class AddModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model to add: from sources, from a configuration, from files, or from all of these."""

    name: str
    sources: tuple[str, ...] = ()
    backend: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    files: tuple[ModelFile, ...] = ()
    credential: str = ""  # the name of the credential for the sources, or of an endpoint's key
    allow_patterns: tuple[str, ...] = ()
    ignore_patterns: tuple[str, ...] = ()
    replicas: int = 1
    load: bool = False
    dry_run: bool = False  # find and check everything, and store nothing


class ReplaceModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A new configuration of a model. With `revision`, only if the model still has that revision."""

    config: dict[str, Any] = field(default_factory=dict)
    replicas: int | None = None
    revision: str = ""


class CopyModel(Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class DefinedReplica(Struct, frozen=True, kw_only=True):
    node_name: str = ""
    slot: int = 0
    is_current: bool = True  # it runs the stored revision


class DefinedModel(Struct, frozen=True, kw_only=True):
    """A model as it is stored, and what people should know of it."""

    name: str
    revision: str = ""
    backend: str = ""
    license: str = ""
    description: str = ""
    size_bytes: int = 0
    replicas: int = 1
    endpoint: str = ""
    alias: str = ""  # the model that answers for this name
    credential: str = ""
    options: ModelOptions = ModelOptions()
    files: tuple[ModelFile, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    running: tuple[DefinedReplica, ...] = ()
    was_there: bool = False  # it is stored as it was: there was a model of that name and definition
    is_stored: bool = True  # false for a dry run, and for one that a gallery only offers
    remarks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    created_at: float = 0.0


class ImportedModels(Struct, frozen=True, kw_only=True):
    models: tuple[DefinedModel, ...] = ()
