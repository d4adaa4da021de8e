"""Where a model comes from: what a text such as `hf:ORG/REPO` means, and what was found there.

Pure: decides the meaning of a text and whether it is well formed. `fetch.models` asks the servers, and `fetch.http`
decides which addresses may be reached. LocalAI's spellings (`huggingface://`, `hf://`, `hf.co/`, `github:`,
`ollama://`, `oci://`) mean what they mean there.
"""

from __future__ import annotations

import re
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from enginehouse.core.errors import EnginehouseError, Invalid
from enginehouse.core.file_name import check_file_name
from enginehouse.core.gallery_source import location
from enginehouse.core.gguf import GgufHeader
from enginehouse.core.model import ModelFile
from enginehouse.core.reference import MAX_URI, is_digest, parse_image, shown_uri

SourceKind = Literal["huggingface", "ollama", "oci", "web", "file", "upload", "kept", "endpoint"]
DEFAULT_REVISION = "main"
_HF_PREFIXES = ("huggingface://", "hf://", "hf:", "hf.co/", "huggingface.co/")
_IMAGE_PREFIXES = ("quay.io/", "ghcr.io/", "docker.io/")
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_QUANTIZATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RESOLVE = re.compile(r"/([^/]+)/([^/]+)/(?:resolve|blob)/([^/]+)/(.+)")
_ENDPOINT_PATHS = ("", "/", "/v1", "/v1/")
ABOUT = (
    "write hf:ORG/REPO[/FILE][@REVISION], ollama://NAME[:TAG], oci://REGISTRY/REPOSITORY[:TAG], https://HOST/FILE, "
    "file:///PATH, or http://HOST:PORT/v1 for a server that is running"
)


class ModelSource(Struct, frozen=True, kw_only=True):
    """The meaning of a source. Which fields are set depends on `kind`."""

    kind: SourceKind
    text: str
    repository: str = ""  # ORG/REPO of Hugging Face, NAMESPACE/NAME of Ollama
    path: str = ""  # a file in the repository, or an absolute path
    revision: str = ""
    quantization: str = ""
    url: str = ""


class FoundModel(Struct, frozen=True, kw_only=True):
    """What a source has: the files of the model, the first of which is the model itself, and what is known of it."""

    files: tuple[ModelFile, ...]
    license: str = ""
    description: str = ""
    header: GgufHeader | None = None
    is_directory: bool = False  # an engine gets the directory, not the first file
    config: dict[str, Any] = {}  # keys of a configuration that the source recommends
    remarks: tuple[str, ...] = ()  # what was chosen, and why
    warnings: tuple[str, ...] = ()


def parse_source(text: str) -> ModelSource:
    """Parse a source; raises `Invalid` that says how it is written."""
    if not text or len(text) > MAX_URI or not text.isprintable() or " " in text:
        raise _refused(text, f"it must have 1 to {MAX_URI} characters without spaces")
    for prefix in _HF_PREFIXES:
        if text.lower().startswith(prefix):
            return _huggingface(text, text[len(prefix) :])
    if text.startswith(_IMAGE_PREFIXES):
        return _image(text, text)
    scheme, sign, rest = text.partition(":")
    match scheme.lower() if sign else "":
        case "http" | "https":
            return _web(text)
        case "github":
            return ModelSource(kind="web", text=text, url=_located(text))
        case "ollama":
            return _ollama(text, rest.removeprefix("//"))
        case "oci":
            return _image(text, rest.removeprefix("//"))
        case "file":
            return _file(text, _located(text).removeprefix("file://"))
        case "upload":
            if not _SHA256.fullmatch(rest):
                raise _refused(text, "after upload: there must be 64 hexadecimal digits")
            return ModelSource(kind="upload", text=text, path=rest)
        case "builtin" | "pypi":
            return ModelSource(kind="kept", text=text)
    raise _refused(text, ABOUT)


def is_source(text: str) -> bool:
    """Whether a text is a source and not the name of a file."""
    try:
        parse_source(text)
    except EnginehouseError:
        return False
    return True


def is_repository(text: str) -> bool:
    """Whether a text looks like ORG/REPO, as directory engines take it."""
    organisation, slash, name = text.partition("/")
    is_file = name.lower().endswith((".gguf", ".bin", ".safetensors", ".pt", ".onnx", ".ggml"))
    return bool(slash and _OWNER.fullmatch(organisation) and _OWNER.fullmatch(name)) and not is_file


def plain_file_name(text: str) -> str:
    """The last part of a path or URL as the name of a file; "" if it is none."""
    last = unquote(urlsplit(text).path if "://" in text else text).rstrip("/").rpartition("/")[2]
    try:
        return check_file_name(last)
    except EnginehouseError:
        return ""


def _huggingface(text: str, rest: str) -> ModelSource:
    rest, at, revision = rest.lstrip("/").partition("@")
    parts = rest.split("/", 2)
    if len(parts) < 2:
        raise _refused(text, "a repository is written hf:ORG/REPO")
    organisation, name = parts[0], parts[1]
    path = parts[2] if len(parts) == 3 else ""
    quantization = ""
    if not path:
        name, colon, quantization = name.partition(":")
        if colon and not _QUANTIZATION.fullmatch(quantization):
            raise _refused(text, "after the colon there must be a quantisation such as Q4_K_M")
    if not _OWNER.fullmatch(organisation) or not _OWNER.fullmatch(name) or ".." in (organisation, name):
        raise _refused(text, "a repository is written hf:ORG/REPO")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise _refused(text, "after the @ there must be a branch, a tag or a commit")
    return ModelSource(
        kind="huggingface",
        text=text,
        repository=f"{organisation}/{name}",
        path=check_file_name(path) if path else "",
        revision=revision or DEFAULT_REVISION,
        quantization=quantization,
    )


def _web(text: str) -> ModelSource:
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise _refused(text, "it is not a URL") from None
    if not host:
        raise _refused(text, "it has no host")
    if "@" in parts.netloc:
        raise _refused(text, "it must not contain a user name or password; name a credential instead")
    if parts.path in _ENDPOINT_PATHS and not parts.query:
        return ModelSource(kind="endpoint", text=text, url=f"{parts.scheme.lower()}://{parts.netloc}")
    found = _RESOLVE.fullmatch(parts.path) if host in ("huggingface.co", "hf.co") else None
    if found is not None:
        return _huggingface(text, unquote(f"{found[1]}/{found[2]}/{found[4]}@{found[3]}"))
    return ModelSource(kind="web", text=text, url=text)


def _ollama(text: str, rest: str) -> ModelSource:
    name, _, tag = rest.partition(":")
    parts = name.split("/")
    repository = "/".join(parts) if len(parts) == 2 else f"library/{parts[0]}"
    if len(parts) > 2 or any(not _OWNER.fullmatch(part) for part in (*parts, tag or "latest")):
        raise _refused(text, "write ollama://[NAMESPACE/]NAME[:TAG]")
    return ModelSource(kind="ollama", text=text, repository=repository, revision=tag or "latest")


def _image(text: str, rest: str) -> ModelSource:
    parse_image(rest)
    return ModelSource(kind="oci", text=text, repository=rest)


def _file(text: str, path: str) -> ModelSource:
    plain = unquote(path)
    if not plain.startswith("/") or ".." in plain.split("/") or not plain.isprintable():
        raise _refused(text, "a file on shared storage needs an absolute path without '..': file:///models/x.gguf")
    return ModelSource(kind="file", text=text, path=plain)


def _located(text: str) -> str:
    try:
        return location(text)
    except EnginehouseError as error:
        raise _refused(text, error.message) from None


def check_sha256(value: str, what: str) -> str:
    """A digest as 64 hexadecimal digits; "" stays ""."""
    plain = value.strip().lower().removeprefix("sha256:")
    if plain and not is_digest(f"sha256:{plain}"):
        raise Invalid(f"cannot use the sha256 of {what}: it must be 64 hexadecimal digits", code="invalid_uri")
    return plain


def _refused(text: str, why: str) -> Invalid:
    return Invalid(
        f"cannot use {shown_uri(text)!r} as the source of a model: {why}", code="invalid_uri", param="source"
    )
