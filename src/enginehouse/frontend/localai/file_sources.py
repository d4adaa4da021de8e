"""Where a frontend reads the files of a model from that it pushes to LocalAI's workers, which fetch nothing themselves.

Sources outside are read through the checked door (`fetch.http.client`), in ranges, so a push goes on in the middle of a
file. Uploads are read from this frontend's disk, built-in files from the package. Nothing is kept here, and nothing is
read whole into memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

from msgspec import Struct

from enginehouse.core.artifact import Layer
from enginehouse.core.errors import EnginehouseError, Hopeless, NotFound, Unavailable, Upstream
from enginehouse.core.model import ModelFile
from enginehouse.core.name import check_name
from enginehouse.core.reference import parse_image
from enginehouse.fetch.files import Described, RegistryFile, WebFile
from enginehouse.fetch.galleries.sources import builtin_directory
from enginehouse.fetch.http.client import Client
from enginehouse.fetch.http.retries import RetryPolicy
from enginehouse.fetch.registry.requests import Registries
from enginehouse.host.blocking import in_thread

READ_BYTES = 1024 * 1024

FindUpload = Callable[[str], Awaitable[Path]]  # the path of a complete upload on this frontend, by digest


class ReadableFile(Protocol):
    """One file of a model at its source."""

    async def size(self) -> int: ...

    def read(self, start: int, end: int) -> AsyncIterator[bytes]:
        """The bytes [start, end). Raises `Upstream` when the source is cut off."""


class _OutsideFile(Protocol):
    async def describe(self) -> Described: ...

    def read(self, layer: Layer, start: int, end: int | None) -> AsyncIterator[bytes]: ...


class FileSources(Struct, frozen=True, kw_only=True):
    client: Client
    registries: Registries
    headers: Callable[[str], Mapping[str, str]]  # of a credential by its name; {} for ""
    find_upload: FindUpload
    patience: RetryPolicy = RetryPolicy()

    async def open(self, file: ModelFile) -> ReadableFile:
        """The source of a file. Sends no request to a source outside."""
        scheme, _, rest = file.uri.partition(":")
        match scheme:
            case "http" | "https":
                headers = self.headers(file.credential)
                web = WebFile(file.uri, self.client, self.patience, headers, has_digest=bool(file.sha256))
                return _Outside(web, file, file.size_bytes if file.sha256 else 0)
            case "oci" | "ollama":
                reference = parse_image(rest.removeprefix("//"))
                registry = RegistryFile(file.uri, reference, self.client, self.registries)
                return _Outside(registry, file, file.size_bytes)
            case "upload":
                return _OnDisk(await self._uploaded(file, rest))
            case "builtin":
                return _OnDisk(await in_thread(_builtin, file))
        raise Hopeless(
            f"cannot push {file.name}: a frontend has no source for {scheme}:, and LocalAI's workers get their files "
            "from frontends; load the model on a worker of Enginehouse",
            code="unsupported",
        )

    async def _uploaded(self, file: ModelFile, sha256: str) -> Path:
        try:
            return await self.find_upload(sha256)
        except NotFound as error:
            # Another frontend may have it and claim the command next.
            raise Unavailable(
                f"cannot push {file.name}: its upload is not on this frontend; it is retried, also by the other "
                "frontends. Upload the file again if it is on none",
                code="upload_elsewhere",
            ) from error


class _Outside:
    """A file of a web server or a registry. `size_bytes` is 0 if the source has to be asked."""

    def __init__(self, origin: _OutsideFile, file: ModelFile, size_bytes: int) -> None:
        self._origin = origin
        self._digest = f"sha256:{file.sha256}"
        self._size_bytes = size_bytes

    async def size(self) -> int:
        if not self._size_bytes:
            self._size_bytes = (await self._origin.describe()).size_bytes
        return self._size_bytes

    async def read(self, start: int, end: int) -> AsyncIterator[bytes]:
        layer = Layer(digest=self._digest, size_bytes=await self.size(), compression="none")
        try:
            async for piece in self._origin.read(layer, start, end):
                yield piece
            return
        except Upstream as error:
            if error.code != "no_ranges":
                raise
        # A server without ranges sends the file from its start; what the worker has already is skipped.
        skipped = start
        async for piece in self._origin.read(layer, 0, end):
            if skipped < len(piece):
                yield piece[skipped:]
            skipped = max(0, skipped - len(piece))


class _OnDisk:
    def __init__(self, path: Path) -> None:
        self._path = path

    async def size(self) -> int:
        return (await in_thread(self._path.stat)).st_size

    async def read(self, start: int, end: int) -> AsyncIterator[bytes]:
        try:
            file: BinaryIO = await in_thread(open, self._path, "rb")
        except OSError as error:
            raise _unreadable(self._path, error) from error
        try:
            await in_thread(file.seek, start)
            left = end - start
            while left:
                piece = await in_thread(file.read, min(READ_BYTES, left))
                if not piece:
                    raise Hopeless(f"cannot read {self._path.name}: it is truncated", code="digest_mismatch")
                left -= len(piece)
                yield piece
        except OSError as error:
            raise _unreadable(self._path, error) from error
        finally:
            await in_thread(file.close)


def _builtin(file: ModelFile) -> Path:
    source = builtin_directory().joinpath(check_name(file.uri.removeprefix("builtin:"), "file"))
    if not isinstance(source, Path) or not source.is_file():
        raise Hopeless(f"cannot find {file.uri}: this version of the frontend does not include it", code="not_found")
    return source


def _unreadable(path: Path, error: OSError) -> EnginehouseError:
    return Unavailable(f"cannot read {path.name} on this frontend: {error.strerror or error}", code="storage_error")
