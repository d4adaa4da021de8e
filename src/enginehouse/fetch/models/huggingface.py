"""Repositories of Hugging Face, or of a server that speaks its API.

A revision is resolved once: every URL that leaves here has the commit in it, so that all nodes fetch the same bytes.
Digests come from the repository's own list (LFS); small files outside of LFS have none. What is chosen among the files
is decided in `core.quantization`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import quote

import msgspec
from msgspec import Struct, field

from enginehouse.core.errors import Hopeless, Invalid, NotFound, TooLarge
from enginehouse.core.file_name import check_file_name
from enginehouse.core.gguf import about_architecture
from enginehouse.core.model import ModelFile
from enginehouse.core.model_source import FoundModel, ModelSource
from enginehouse.core.quantization import GgufChoice, RepositoryFile, choose_directory, choose_gguf
from enginehouse.fetch.http.answers import failure
from enginehouse.fetch.http.client import Client, OutboundRequest
from enginehouse.fetch.http.retries import RetryPolicy
from enginehouse.fetch.models.credentials import HUGGINGFACE, ModelCredentials, gated
from enginehouse.fetch.models.web import probe

MAX_LISTING_BYTES = 16 * 1024**2  # a repository of ten thousand files
LIST_SECONDS = 30.0
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Engines by what a repository of weights is for, as its card says.
_EMBEDDING_TASKS = frozenset({"feature-extraction", "sentence-similarity"})


class _Lfs(Struct):
    sha256: str = ""
    size: int = 0


class _Sibling(Struct, rename={"path": "rfilename"}):
    path: str
    size: int | None = None
    lfs: _Lfs | None = None


class _Card(Struct):
    license: str | list[str] | None = None
    license_name: str | None = None


class _Listing(Struct):
    """The part of the hub's answer that is used."""

    sha: str = ""
    siblings: list[_Sibling] = field(default_factory=list)
    card: _Card | None = field(default=None, name="cardData")
    task: str | None = field(default=None, name="pipeline_tag")

    @property
    def license(self) -> str:
        if self.card is None:
            return ""
        named = self.card.license_name or self.card.license or ""
        return ", ".join(named) if isinstance(named, list) else named


class Wishes(Struct, frozen=True, kw_only=True):
    """What a person asked for besides the repository."""

    credential: str = ""
    memory_bytes: tuple[int, ...] = ()  # free memory of each node
    allow: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    is_directory: bool = False  # the engine reads a directory


class HuggingFace:
    def __init__(self, client: Client, endpoint: str, credentials: ModelCredentials, patience: RetryPolicy) -> None:
        self._client = client
        self._endpoint = endpoint.rstrip("/")
        self._credentials = credentials
        self._patience = patience

    async def find(self, source: ModelSource, wishes: Wishes) -> FoundModel:
        name = wishes.credential or (HUGGINGFACE if self._credentials.has(HUGGINGFACE) else "")
        listing = await self._list(source, name)
        files = [_file(one) for one in listing.siblings]
        if source.path:
            return await self._one_file(source, listing, files, name)
        choice = None
        if not wishes.is_directory and not wishes.allow:
            choice = choose_gguf(files, wishes.memory_bytes, wanted=source.quantization, repository=source.repository)
        if choice is not None:
            return await self._gguf(source, listing, choice, name)
        chosen = choose_directory(files, wishes.allow, wishes.ignore)
        if not chosen:
            raise Invalid(
                f"cannot use {source.repository}: it has neither a GGUF model nor weights as safetensors; name a file "
                f"with hf:{source.repository}/FILE",
                code="unsupported",
                param="source",
            )
        return self._directory(source, listing, chosen, name)

    async def _one_file(
        self, source: ModelSource, listing: _Listing, files: Sequence[RepositoryFile], name: str
    ) -> FoundModel:
        found = next((file for file in files if file.path == source.path), None)
        if found is None:
            others = ", ".join(file.path for file in files if file.path.lower().endswith(".gguf")) or "no GGUF files"
            raise NotFound(
                f"cannot find {source.path} in {source.repository}: it has {others[:300]}",
                code="not_found",
                param="source",
            )
        choice = GgufChoice(files=(found,), projector=None, quantization="", reason="")
        if found.path.lower().endswith(".gguf"):
            return await self._gguf(source, listing, choice, name)
        return FoundModel(files=(self._placed(source, listing, found, name, is_flat=True),), license=listing.license)

    async def _gguf(self, source: ModelSource, listing: _Listing, choice: GgufChoice, name: str) -> FoundModel:
        files = [self._placed(source, listing, file, name, is_flat=True) for file in choice.files]
        begun = await probe(self._client, files[0].uri, self._credentials.headers(name), credential=name)
        config: dict[str, object] = {"parameters": {"model": files[0].name}}
        if choice.projector is not None:
            projector = self._placed(source, listing, choice.projector, name, is_flat=True)
            files.append(projector)
            config["mmproj"] = projector.name
        header = begun.header
        if header is not None and header.is_reranker:
            config["reranking"] = True
        elif header is not None and header.is_embedding:
            config["embeddings"] = True
        doubt = about_architecture(header) if header is not None else ""
        too_large = (f"{choice.reason.partition(';')[0]}",) if choice.is_too_large else ()
        return FoundModel(
            files=tuple(files),
            license=listing.license or (header.license if header is not None else ""),
            header=header,
            config=config,
            remarks=(choice.reason,) if choice.reason else (),
            warnings=(*too_large, *([doubt] if doubt else [])),
        )

    def _directory(
        self, source: ModelSource, listing: _Listing, chosen: Sequence[RepositoryFile], name: str
    ) -> FoundModel:
        ordered = sorted(chosen, key=lambda file: (file.path != "config.json", file.path))
        config: dict[str, object] = {"parameters": {"model": source.repository}}
        if listing.task in _EMBEDDING_TASKS:
            config["embeddings"] = True
        return FoundModel(
            files=tuple(self._placed(source, listing, file, name, is_flat=False) for file in ordered),
            license=listing.license,
            is_directory=True,
            config=config,
            remarks=(f"the repository is used as a directory of {len(ordered)} files",),
        )

    def _placed(
        self, source: ModelSource, listing: _Listing, file: RepositoryFile, name: str, *, is_flat: bool
    ) -> ModelFile:
        placed = file.path.rpartition("/")[2] if is_flat else file.path
        return ModelFile(
            name=check_file_name(placed),
            uri=f"{self._endpoint}/{source.repository}/resolve/{listing.sha}/{quote(file.path)}",
            sha256=file.sha256,
            size_bytes=file.size_bytes,
            credential=name,
        )

    async def _list(self, source: ModelSource, name: str) -> _Listing:
        what = f"{source.repository} at {source.revision}"
        url = f"{self._endpoint}/api/models/{source.repository}/revision/{quote(source.revision, safe='')}?blobs=true"
        request = OutboundRequest(url=url, headers=self._credentials.headers(name))
        try:
            answer = await self._patience.retried(
                lambda: self._client.exchange(request, MAX_LISTING_BYTES, LIST_SECONDS)
            )
        except TooLarge as error:
            raise Hopeless(
                f"cannot use {what}: its list of files is too long; name one file", code="too_large"
            ) from error
        if answer.status in (401, 403):
            raise gated(what, name)
        if answer.status == 404:
            raise NotFound(
                f"cannot find {what} at {self._endpoint}: check the name and the revision",
                code="not_found",
                param="source",
            )
        if answer.status != 200:
            raise failure(answer.status, what, answer.headers)
        try:
            listing = msgspec.json.decode(answer.body, type=_Listing)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Hopeless(f"cannot read the list of files of {what}: {error}", code="unsupported") from error
        if not _COMMIT.fullmatch(listing.sha):
            raise Hopeless(f"cannot use {what}: the answer has no commit to pin", code="unsupported")
        return listing


def _file(one: _Sibling) -> RepositoryFile:
    sha256 = one.lfs.sha256 if one.lfs is not None and _SHA256.fullmatch(one.lfs.sha256) else ""
    size = one.size if one.size is not None else one.lfs.size if one.lfs is not None else 0
    return RepositoryFile(one.path, max(0, size), sha256)
