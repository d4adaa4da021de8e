"""Sources of galleries: LocalAI's JSON list, and what each location means.

Pure. A location is `file:`, `http(s):` or `github:org/repo/path[@ref]`; others are refused here, before anything is
fetched. `fetch` decides which addresses may be reached.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Struct

from enginehouse.core.errors import EnginehouseError, Invalid
from enginehouse.core.name import check_name, shown

BUILTIN = "enginehouse"  # the name of the gallery shipped with the package
MAX_SOURCES = 32
MAX_URL = 2048
_GITHUB = re.compile(r"github:(?://)?([^/@]+)/([^/@]+)/([^@]+)(?:@(.+))?")
_SAFE_IN_GITHUB = re.compile(r"[A-Za-z0-9._/-]+")


class GallerySource(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One element of LocalAI's list. `verification` is its signature policy, unchanged."""

    name: str
    url: str
    mirrors: tuple[str, ...] = ()
    verification: dict[str, object] = {}


class _Written(Struct, frozen=True, kw_only=True):
    """An element as written by users and Go programs: absent values may be null."""

    name: str
    url: str
    mirrors: tuple[str, ...] | None = None
    verification: dict[str, object] | None = None


HUGGINGFACE = "https://huggingface.co"  # the hub of models; settings may name a mirror of it
LOCALAI = GallerySource(
    name="localai",
    url="https://index.localai.io/backends",
    mirrors=("github:mudler/LocalAI/backend/index.yaml@master",),
)

LOCALAI_MODELS = GallerySource(
    name="localai",
    url="https://index.localai.io/models",
    mirrors=("github:mudler/LocalAI/gallery/index.yaml@master",),
)


def decode_sources(value: str | bytes | object) -> tuple[GallerySource, ...]:
    """Parse sources from JSON text or from the decoded list; `Invalid` says what is wrong."""
    try:
        if isinstance(value, str | bytes):
            found = msgspec.json.decode(value, type=tuple[_Written, ...])
        else:
            found = msgspec.convert(value, tuple[_Written, ...])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(
            'cannot read the galleries: they are a JSON list like [{"name": "ours", "url": '
            f'"https://host/index.yaml"}}], or [] for the built-in gallery only: {error}',
            code="invalid_setting",
        ) from error
    if len(found) > MAX_SOURCES:
        raise Invalid(f"cannot use {len(found)} galleries: at most {MAX_SOURCES} are allowed", code="invalid_setting")
    checked = tuple(_checked(one) for one in found)
    names = [one.name for one in checked]
    for name in names:
        if names.count(name) > 1 or name == BUILTIN:
            raise Invalid(f"cannot use the gallery name {name}: it is taken. Give each its own", code="invalid_setting")
    return checked


def encode_sources(sources: tuple[GallerySource, ...]) -> str:
    return msgspec.json.encode(sources).decode()


def _checked(written: _Written) -> GallerySource:
    check_name(written.name, "gallery")
    policy = {key: value for key, value in (written.verification or {}).items() if value}
    source = GallerySource(name=written.name, url=written.url, mirrors=written.mirrors or (), verification=policy)
    for url in candidates(source):
        location(url)
    return source


def candidates(source: GallerySource) -> tuple[str, ...]:
    """The locations to try, in order and without duplicates."""
    return tuple(url for url in dict.fromkeys((source.url, *source.mirrors)) if url) or (source.url,)


def location(url: str) -> str:
    """The `file:///…`, `http://…` or `https://…` URL that `url` stands for."""
    try:
        return _location(url)
    except EnginehouseError as error:
        raise Invalid(f"cannot use {shown(url)} as a gallery: {error.message}", code="invalid_uri") from error


def _location(url: str) -> str:
    if not url or len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url:
        raise Invalid(f"an address is 1 to {MAX_URL} printable ASCII characters without spaces")
    scheme, sign, rest = url.partition(":")
    match scheme.lower():
        case "http" | "https" if rest.startswith("//") and rest[2:]:
            if "@" in rest[2:].partition("/")[0]:
                raise Invalid("it must not contain a user name or password")
            return f"{scheme.lower()}:{rest}"
        case "file" if sign:
            path = rest.removeprefix("//localhost") if rest.startswith("//localhost/") else rest
            path = path[2:] if path.startswith("//") else path
            if not path.startswith("/"):
                raise Invalid("a file needs an absolute path: file:///etc/enginehouse/index.yaml")
            return f"file://{path}"
        case "github":
            return _raw_github(url)
    raise Invalid("galleries come from https://…, http://…, file:///… or github:org/repo/path[@ref]")


def _raw_github(url: str) -> str:
    found = _GITHUB.fullmatch(url)
    if found is None:
        raise Invalid("write it as github:org/repo/path[@ref]")
    parts = [part or "main" for part in found.groups()]
    if any(not _SAFE_IN_GITHUB.fullmatch(part) or ".." in part.split("/") for part in parts):
        raise Invalid("a path on github holds letters, digits, '.', '_', '-' and '/' only")
    organisation, repository, path, reference = parts
    return f"https://raw.githubusercontent.com/{organisation}/{repository}/{reference}/{path}"
