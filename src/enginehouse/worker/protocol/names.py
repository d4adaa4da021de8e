"""Resolves a name in a message to a directory on this node, or to a build to install.

A message of an Enginehouse frontend contains the resolved build, which is used as it is. A message of a Go frontend
contains only names: they are searched among the installed backends (directory, meta name, alias) and then, for this
machine, in the galleries that the message names. The bus is not trusted: every name is checked before it is used,
`gallery@name` never becomes a directory, and files of this machine are never installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from enginehouse.core import wire
from enginehouse.core.backend import InstalledBackend, Resolved
from enginehouse.core.errors import Conflict, Invalid, NotFound
from enginehouse.core.external import external_build
from enginehouse.core.gallery import resolve
from enginehouse.core.gallery_entry import Gallery
from enginehouse.core.installation import check_directory, directory_behind
from enginehouse.core.name import check_model_name
from enginehouse.core.reference import parse_uri, shown_uri
from enginehouse.fetch.galleries.sources import load_builtin
from enginehouse.host import hardware


class KnownNames(Struct, frozen=True, kw_only=True):
    """Everything in which a name can be resolved."""

    installed: Sequence[InstalledBackend] = ()
    aliases: Mapping[str, Sequence[str]] = {}
    galleries: Sequence[Gallery] = ()


def plain_name(name: str) -> str:
    """The name without its gallery prefix."""
    return name.rpartition("@")[2]


def model_name(name: str) -> str:
    """Check a model name and return it. Joined to the models directory, it must not lead out of it."""
    check_model_name(name)
    if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
        raise Invalid(
            f"cannot use {name[:40]!r} as a model name: it leads out of the directory of models", code="invalid_name"
        )
    return name


def find_installed(known: KnownNames, name: str) -> str | None:
    """The directory of an installed backend, by directory, meta name or alias; None if there is none."""
    plain = plain_name(name)
    # The full name first: LocalAI's workers make pointers named `gallery@name`.
    found = directory_behind(known.installed, name) or directory_behind(known.installed, plain)
    if found is not None:
        return check_directory(found)
    candidates = known.aliases.get(plain, ())
    if len(candidates) > 1:
        raise Conflict(f"cannot resolve {plain!r}: {', '.join(candidates)} have that alias; use one of these names")
    return check_directory(candidates[0]) if candidates else None


def installed_directory(known: KnownNames, name: str) -> str:
    """As `find_installed`, but raises `NotFound`."""
    found = find_installed(known, name)
    if found is None:
        raise NotFound(f"cannot find a backend named {plain_name(name)!r} on this node", code="not_found")
    return found


def literal_directory(known: KnownNames, name: str) -> str:
    """The directory in a message of an Enginehouse frontend; it need not exist. Only pointers are followed."""
    return check_directory(directory_behind(known.installed, name) or name)


def find_usable(known: KnownNames, name: str) -> InstalledBackend | None:
    """The installed backend of a name, if it can be started."""
    directory = find_installed(known, name) if name else None
    for backend in known.installed:
        if backend.name == directory and not backend.is_meta and not backend.is_broken:
            return backend
    return None


def build_for(request: wire.BackendInstallRequest | wire.BackendUpgradeRequest, known: KnownNames) -> Resolved:
    """The build that a request asks for."""
    if request.resolved is not None:
        return request.resolved
    if request.uri:
        return _external(request.uri, request.name or plain_name(request.backend), request.alias)
    if not request.backend:
        raise Invalid("cannot install: the request names neither a backend nor a uri", code="invalid_name")
    try:
        return _in_galleries(request.backend, known.galleries or (load_builtin(),))
    except NotFound:
        found = _installed_from_elsewhere(request.backend, known)
        if found is None:
            raise
        return found


def _external(uri: str, name: str, alias: str) -> Resolved:
    source = parse_uri(uri)
    if source.kind in ("directory", "ocifile"):
        raise Invalid(
            f"cannot install from {shown_uri(uri)}: files of this machine cannot be requested over the bus; "
            "install them with `enginehouse local`",
            code="uri_not_allowed",
            param="uri",
        )
    if not name:
        raise Invalid(
            f"cannot install from {shown_uri(uri)} without a name; set `name` to the name of the backend",
            code="invalid_name",
            param="name",
        )
    return external_build(uri, name, alias=alias)


def _in_galleries(name: str, galleries: Sequence[Gallery]) -> Resolved:
    try:
        return resolve(galleries, name, hardware.capability(), hardware.platform())
    except NotFound:
        if "@" not in name:
            raise
        # A frontend may name its galleries differently; the entry counts.
        return resolve(galleries, plain_name(name), hardware.capability(), hardware.platform())


def _installed_from_elsewhere(name: str, known: KnownNames) -> Resolved | None:
    """The build of an installed backend that is in no gallery, from its recorded URI; None without a usable URI."""
    directory = find_installed(known, name)
    backend = next((one for one in known.installed if one.name == directory and one.uri), None)
    if backend is None or parse_uri(backend.uri).kind not in ("image", "archive"):
        return None
    alias = next((alias for alias, names in known.aliases.items() if backend.name in names), "")
    return external_build(backend.uri, backend.name, alias=alias)
