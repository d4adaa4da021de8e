"""Backends: what is requested (`Resolved`) and what a node has (`InstalledBackend`).

The identity of a backend on a node is the directory it installs into, regardless of the requested alias or meta name.
Its version is a digest.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from msgspec import Struct

from enginehouse.core.artifact import Artifact
from enginehouse.core.name import check_name
from enginehouse.core.replica import EngineProtocol


class Resolved(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A concrete build that the frontend chose for one node; the worker does not resolve again."""

    directory: str
    uri: str
    # "" until an image's tag or an archive has been resolved. An unknown digest equals no other, not even another "".
    digest: str
    source: str = ""  # the gallery it came from
    platform: str = ""
    # The meta name that points to it ("" if requested by its own name); the worker writes a pointer directory for it.
    meta: str = ""
    alias: str = ""
    version: str = ""
    # For Python packages: every line pinned and hashed. The digest covers them.
    requirements: tuple[str, ...] = ()
    launcher: str = ""  # the built-in launcher that turns the package into a server
    size_bytes: int = 0  # unpacked, for progress
    mirrors: tuple[str, ...] = ()  # other locations of the same content, in order
    sha256: str = ""  # of an archive; images carry their own digests
    index_digest: str = ""  # of the image index that contains `digest`: LocalAI workers may record this one
    gallery_url: str = ""
    protocol: EngineProtocol | Literal[""] = ""  # what its process speaks, if its gallery entry says so
    remark: str = ""  # what people should know of this choice, such as unused graphics cards


class InstalledBackend(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One element of `backend.list`, plus the last generation applied to the directory (additive)."""

    name: str
    is_system: bool
    is_meta: bool
    installed_at: str = ""
    gallery_url: str = ""
    version: str = ""
    uri: str = ""
    digest: str = ""
    # Additive.
    meta_backend_for: str = ""
    generation: int = 0
    is_broken: bool = False
    is_unsettled: bool = False  # installed, but its sync to disk was not confirmed, so it may be undone
    # The version that its worker has kept, for a rollback; "" if there is none.
    previous_digest: str = ""
    previous_version: str = ""


def package_digest(uri: str, requirements: tuple[str, ...], launcher: str, version: str) -> str:
    """The version of a backend made from Python packages: it covers everything that determines the files on disk.

    Frontend and worker both compute it, so a worker never installs anything else under that digest.
    """
    text = "\n".join((uri, launcher, version, *requirements))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def is_version(recorded: str, available: Resolved | Artifact) -> bool:
    """Whether the digest that a node recorded is that of a build. A digest that was not recorded equals nothing.
    LocalAI records the digest of the index, we record that of the platform's manifest.
    """
    return bool(recorded) and recorded in (available.digest, available.index_digest)


def version_name(version: str, digest: str) -> str:
    """A version for people: its name, or the beginning of its digest."""
    return version or digest.removeprefix("sha256:")[:12] or "the version before"


ALREADY = "already at "  # how the note of an install begins that changed nothing


def change_note(before: tuple[str, str] | None, after: tuple[str, str]) -> str:
    """What an install changed, from two versions given as (version, digest): "from 1.3 to 1.4"."""
    now = version_name(*after)
    if before is None:
        return f"now {now}"
    if version_name(*before) != now:
        return f"from {version_name(*before)} to {now}"
    # A tag that was moved: the same name, other content.
    is_moved = before[1] and after[1] and before[1] != after[1]
    return f"from {version_name('', before[1])} to {version_name('', after[1])}" if is_moved else f"{ALREADY}{now}"


def check_resolved(resolved: Resolved) -> Resolved:
    """Return `resolved` if its names are safe path components. Used by the worker, which does not trust the bus."""
    check_name(resolved.directory, "backend")
    if resolved.meta:
        check_name(resolved.meta, "backend")
    if resolved.alias:
        check_name(resolved.alias, "backend")
    return resolved


def find(backends: tuple[InstalledBackend, ...], name: str) -> InstalledBackend | None:
    """The concrete, usable backend behind a directory or meta name, as the node reported it."""
    by_name = {backend.name: backend for backend in backends}
    found = by_name.get(name)
    if found is not None and found.is_meta:
        found = by_name.get(found.meta_backend_for)
    return None if found is None or found.is_broken or found.is_meta else found
