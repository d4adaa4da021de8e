"""URIs of backends, and image references as docker understands them.

Pure: it decides what a text means and whether it is well formed. `fetch` decides which addresses may be reached.
Messages never contain secrets from a URI: user-info and queries are removed from what is shown.
"""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

from enginehouse.core.artifact import Compression, Form
from enginehouse.core.errors import Invalid

MAX_URI = 2048
DOCKER_HUB = "docker.io"
# The registry of Docker Hub has another host name than its references.
_REGISTRY_OF_HUB = "registry-1.docker.io"
_NAMES_OF_HUB = {DOCKER_HUB, "index.docker.io", _REGISTRY_OF_HUB}

_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_USER = re.compile(r"(?<=//)[^/?#]*@")
MAX_REPOSITORY = 255

# Longest suffix first: `.tar.gz` is not `.gz`.
_SUFFIXES: tuple[tuple[str, Form, Compression], ...] = (
    (".tar.gz", "tar", "gzip"),
    (".tar.zst", "tar", "zstd"),
    (".tgz", "tar", "gzip"),
    (".tar", "tar", "none"),
    (".zip", "zip", "none"),
)


class ImageReference(Struct, frozen=True, kw_only=True):
    """`[host/]repository[:tag][@digest]` with defaults filled in; with a digest, the tag is informational."""

    host: str
    repository: str
    tag: str = ""
    digest: str = ""

    @property
    def registry(self) -> str:
        """The host[:port] of the registry."""
        return _REGISTRY_OF_HUB if self.host == DOCKER_HUB else self.host

    @property
    def wanted(self) -> str:
        """The reference to request from the registry: the digest if there is one, else the tag."""
        return self.digest or self.tag

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.host}/{self.repository}{tag}" + (f"@{self.digest}" if self.digest else "")


class Source(Struct, frozen=True, kw_only=True):
    """The meaning of a URI. `path` is for local files, `url` for archives, `image` for images, `package` for PyPI."""

    kind: Literal["image", "ocifile", "archive", "directory", "package"]
    image: ImageReference | None = None
    path: str = ""
    url: str = ""
    package: str = ""
    form: Form = "tar"
    compression: Compression = "none"


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def shown_uri(uri: str) -> str:
    """`uri` for a message: without user-info, query and fragment, control characters replaced, truncated if long."""
    bare = _USER.sub("", re.split(r"[?#]", uri, maxsplit=1)[0])
    if "//" not in bare and "@" in bare and not bare.partition("@")[2].startswith("sha256:"):
        bare = bare.rpartition("@")[2]
    text = "".join(character if character.isprintable() else "?" for character in bare)
    return text if len(text) <= 200 else text[:197] + "..."


def parse_uri(uri: str) -> Source:
    """Parse a URI; raise `Invalid` with `invalid_uri`, or `uri_not_allowed` for one that is never allowed."""
    if not uri or len(uri) > MAX_URI:
        raise _invalid(uri, f"it must have 1 to {MAX_URI} characters")
    if any(not character.isprintable() or character == " " for character in uri):
        raise Invalid(
            f"cannot use {shown_uri(uri)!r} as a URI: it contains spaces or control characters", code="uri_not_allowed"
        )
    if uri.startswith("pypi:"):
        return Source(kind="package", package=uri.removeprefix("pypi:"))
    if uri.startswith("/"):
        return Source(kind="directory", path=_absolute(uri, uri))
    found = _SCHEME.match(uri)
    if found is None:
        return Source(kind="image", image=parse_image(uri))
    rest = uri[found.end() :]
    match found[1].lower():
        case "oci":
            return Source(kind="image", image=parse_image(rest))
        case "ocifile":
            return Source(kind="ocifile", path=_absolute(rest, uri))
        case "file":
            return Source(kind="directory", path=_absolute(rest, uri))
        case "http" | "https":
            return _archive(uri)
        case scheme:
            raise Invalid(
                f"cannot use {shown_uri(uri)}: {scheme}:// is not allowed. Use an image reference, oci://, ocifile://, "
                "http(s)://, file:// or pypi:",
                code="uri_not_allowed",
            )


def parse_image(text: str) -> ImageReference:
    """Parse a reference as docker does: no host means Docker Hub, no tag and no digest mean `latest`."""
    name, at, digest = text.partition("@")
    if at and not is_digest(digest):
        raise _invalid(text, "after the @ there must be sha256: and 64 hexadecimal digits")
    host, slash, rest = name.partition("/")
    if not slash or not ("." in host or ":" in host or host == "localhost" or host != host.lower()):
        host, rest = DOCKER_HUB, name
    repository, colon, tag = rest.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise _invalid(text, "its tag must be letters, digits, '.', '_' and '-', at most 128")
    host = host.lower()
    if not _HOST.fullmatch(host) or not _is_port(host):
        raise _invalid(text, "its host is invalid")
    if host in _NAMES_OF_HUB:
        host = DOCKER_HUB
        repository = repository if "/" in repository else f"library/{repository}"
    if len(repository) > MAX_REPOSITORY or not _REPOSITORY.fullmatch(repository):
        raise _invalid(text, "an image is [host[:port]/]repository[:tag][@sha256:…] in lower case")
    return ImageReference(
        host=host, repository=repository, tag=tag if tag or digest else "latest", digest=digest if at else ""
    )


def _is_port(host: str) -> bool:
    port = host.rpartition("]")[2].rpartition(":")[2] if ":" in host.rpartition("]")[2] else ""
    return not port or 0 < int(port) < 65536


def _archive(url: str) -> Source:
    if _USER.search(url):
        # It would be stored in rows, journals and metadata and shown to everyone who may read those.
        raise Invalid(
            f"cannot use {shown_uri(url)} with a user name or password: remove them and set the credentials of "
            "the host with --registry-credentials",
            code="uri_not_allowed",
            param="uri",
        )
    path = re.split(r"[?#]", url, maxsplit=1)[0].lower()
    for suffix, form, compression in _SUFFIXES:
        if path.endswith(suffix):
            return Source(kind="archive", url=url, form=form, compression=compression)
    suffixes = ", ".join(suffix for suffix, _, _ in _SUFFIXES)
    raise Invalid(
        f"cannot install from {shown_uri(url)}: an archive must end in {suffixes}. An image is given without http://",
        code="unsupported",
    )


def _absolute(path: str, uri: str) -> str:
    if not path.startswith("/") or path.startswith("//"):
        raise _invalid(uri, "the path must be absolute, as in ocifile:///path or file:///path")
    return path


def _invalid(uri: str, why: str) -> Invalid:
    return Invalid(f"cannot use {shown_uri(uri)!r} as a URI: {why}", code="invalid_uri")
