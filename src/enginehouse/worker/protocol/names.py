"""What a name in a message means on this node: a directory, or a build to install.

A message of ours carries the resolved build, which is obeyed. One of a Go frontend carries only names: they are looked
for among what is installed, by directory, meta name or alias, and then in the galleries it names, for this machine.
The bus is not trusted: every name is checked before anything acts on it, `gallery@name` never becomes a directory, and
files of this machine are never what is installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from enginehouse.core import wire
from enginehouse.core.backend import InstalledBackend, Resolved
from enginehouse.core.errors import Conflict, Invalid, NotFound
from enginehouse.core.external import external_build
from enginehouse.core.gallery import Gallery, resolve
from enginehouse.core.installation import check_directory, directory_behind
from enginehouse.core.name import check_model_name
from enginehouse.core.reference import parse_uri, shown_uri
from enginehouse.fetch.galleries.sources import load_builtin
from enginehouse.host import hardware


class KnownNames(Struct, frozen=True, kw_only=True):
    """What a name can mean here."""

    installed: Sequence[InstalledBackend] = ()
    aliases: Mapping[str, Sequence[str]] = {}
    galleries: Sequence[Gallery] = ()


def plain_name(name: str) -> str:
    """Without the gallery that a frontend put before it."""
    return name.rpartition("@")[2]


def model_name(name: str) -> str:
    """`name` itself, if it is one and would stay where models are, whoever joins it to a path."""
    check_model_name(name)
    if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
        raise Invalid(
            f"cannot use {name[:40]!r} as a model name: it leads out of the directory of models", code="invalid_name"
        )
    return name


def find_installed(known: KnownNames, name: str) -> str | None:
    """The directory that a name means among what is installed; None where it means nothing."""
    plain = plain_name(name)
    # As it is first: LocalAI's workers make pointers that are called `gallery@name`.
    found = directory_behind(known.installed, name) or directory_behind(known.installed, plain)
    if found is not None:
        return check_directory(found)
    candidates = known.aliases.get(plain, ())
    if len(candidates) > 1:
        raise Conflict(f"cannot tell which backend {plain!r} means: {', '.join(candidates)} have that alias; name one")
    return check_directory(candidates[0]) if candidates else None


def installed_directory(known: KnownNames, name: str) -> str:
    """For whoever needs it to be there."""
    found = find_installed(known, name)
    if found is None:
        raise NotFound(f"cannot find a backend named {plain_name(name)!r} on this node", code="not_found")
    return found


def literal_directory(known: KnownNames, name: str) -> str:
    """For messages of ours, which name the directory of the intent's subject, there or not; only a pointer leads on."""
    return check_directory(directory_behind(known.installed, name) or name)


def find_usable(known: KnownNames, name: str) -> InstalledBackend | None:
    """The backend behind a name that could be started as it is."""
    directory = find_installed(known, name) if name else None
    for backend in known.installed:
        if backend.name == directory and not backend.is_meta and not backend.is_broken:
            return backend
    return None


def build_for(request: wire.BackendInstallRequest | wire.BackendUpgradeRequest, known: KnownNames) -> Resolved:
    """What a request asks to have installed."""
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
            f"cannot install from {shown_uri(uri)}: files of this machine are installed with `enginehouse local`",
            code="uri_not_allowed",
            param="uri",
        )
    if not name:
        raise Invalid(
            f"cannot install from {shown_uri(uri)} without a name: say in `name` what the backend is to be called",
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
        # A frontend calls its galleries what it likes; the entry is what was meant.
        return resolve(galleries, plain_name(name), hardware.capability(), hardware.platform())


def _installed_from_elsewhere(name: str, known: KnownNames) -> Resolved | None:
    """What no gallery knows and is installed all the same, from where it came; None where nobody wrote that down."""
    directory = find_installed(known, name)
    backend = next((one for one in known.installed if one.name == directory and one.uri), None)
    if backend is None or parse_uri(backend.uri).kind not in ("image", "archive"):
        return None
    alias = next((alias for alias, names in known.aliases.items() if backend.name in names), "")
    return external_build(backend.uri, backend.name, alias=alias)
