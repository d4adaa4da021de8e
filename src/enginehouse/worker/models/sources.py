"""Where the bytes of a model's file come from: a concrete address becomes an origin that can be read in ranges.

Makes no request before it is asked for the size or for bytes. Everything outside goes through the checked door
(`fetch.http.client`); uploads are read from the worker's own frontends. Secrets of credentials stay here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from enginehouse.core.artifact import Artifact, Layer
from enginehouse.core.errors import Hopeless, Invalid
from enginehouse.core.model import ModelFile
from enginehouse.core.name import shown
from enginehouse.core.reference import parse_image
from enginehouse.fetch.files import Described, RegistryFile, WebFile
from enginehouse.fetch.http.client import Client
from enginehouse.fetch.http.retries import RetryPolicy
from enginehouse.fetch.oci.local import LocalBlob
from enginehouse.fetch.origins import Origin
from enginehouse.fetch.registry.requests import Registries
from enginehouse.link.uploads import FrontendUploads, UploadOrigin

CredentialHeaders = Callable[[str], Mapping[str, str]]  # of a credential by its name; {} for ""


class FileOrigin(Origin, Protocol):
    """An origin of one file."""

    async def describe(self) -> Described: ...


class _UploadedFile(UploadOrigin):
    async def describe(self) -> Described:
        return Described(await self.size(), self._sha256)

    async def resolve(self, platform: str) -> Artifact:
        raise Hopeless("cannot install an upload: it is a single file", code="unsupported")

    def local(self, layer: Layer) -> LocalBlob | None:
        return None


class ModelSources(Struct, frozen=True, kw_only=True):
    client: Client
    registries: Registries
    patience: RetryPolicy
    headers: CredentialHeaders
    uploads: FrontendUploads | None = None
    directories: tuple[Path, ...] = ()  # shared storage, from which files are read in place

    def open(self, file: ModelFile) -> FileOrigin:
        """The origin of a file that has to be downloaded."""
        scheme, _, rest = file.uri.partition(":")
        match scheme:
            case "http" | "https":
                headers = self.headers(file.credential)
                return WebFile(file.uri, self.client, self.patience, headers, has_digest=bool(file.sha256))
            case "oci" | "ollama":
                return RegistryFile(file.uri, parse_image(rest.removeprefix("//")), self.client, self.registries)
            case "upload" if self.uploads is not None:
                return _UploadedFile(self.uploads, rest)
        raise Invalid(f"cannot fetch {file.name}: this worker has no source for {scheme}:", code="unsupported")

    def shared_path(self, file: ModelFile) -> Path:
        """The file on shared storage that a `file:` address names, links resolved. Blocks."""
        path = Path(file.uri.removeprefix("file://"))
        try:
            found = path.resolve(strict=True)
        except OSError as error:
            raise Hopeless(
                f"cannot read {shown(str(path))} on this node: {error.strerror or error}; mount the storage there",
                code="not_found",
            ) from error
        if not any(found.is_relative_to(allowed.resolve()) for allowed in self.directories):
            raise Invalid(
                f"cannot read {shown(str(path))}: it is not in a directory that this worker allows; start the worker "
                "with --model-directories",
                code="uri_not_allowed",
            )
        if not found.is_file():
            raise Hopeless(f"cannot use {shown(str(path))}: it is not a file", code="not_found")
        return found
