"""Backends: what is asked for (`Resolved`) and what a node has (`InstalledBackend`).

The identity of a backend on a node is the directory it installs into, whatever alias or meta name was used to ask for
it; its version is a digest.
"""

from __future__ import annotations

import hashlib

from msgspec import Struct

from enginehouse.core.name import check_name


class Resolved(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A concrete build, chosen by the frontend for one node; the worker obeys it without resolving again."""

    directory: str
    uri: str
    # "" until an image's tag or an archive has been resolved: equal to nothing, not even to another "".
    digest: str
    source: str = ""  # the gallery it came from
    platform: str = ""
    # The meta name that points to it ("" when asked for by its own name); the worker writes a pointer directory for it.
    meta: str = ""
    alias: str = ""
    version: str = ""
    # Python packages: every line pinned and hashed. Part of what the digest covers.
    requirements: tuple[str, ...] = ()
    launcher: str = ""  # which of the built-in launchers turns the package into a server
    size_bytes: int = 0  # unpacked, for progress
    mirrors: tuple[str, ...] = ()  # other places of the same thing, in order
    sha256: str = ""  # of an archive; images carry their own digests
    index_digest: str = ""  # of the image index that `digest` was found in: what LocalAI's workers may record
    gallery_url: str = ""


class InstalledBackend(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One element of `backend.list`, with the last generation applied to the directory (additive)."""

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
    is_unsettled: bool = False  # in place, and not known to be on disk: it may yet be undone


def package_digest(uri: str, requirements: tuple[str, ...], launcher: str, version: str) -> str:
    """The version of a backend made from Python packages: everything that decides what ends up on disk.

    Both sides compute it, so a worker never installs under a digest something that the frontend did not mean.
    """
    text = "\n".join((uri, launcher, version, *requirements))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def check_resolved(resolved: Resolved) -> Resolved:
    """`resolved` itself, if its names are safe as path components. For the worker: the bus is not trusted."""
    check_name(resolved.directory, "backend")
    if resolved.meta:
        check_name(resolved.meta, "backend")
    if resolved.alias:
        check_name(resolved.alias, "backend")
    return resolved


def find(backends: tuple[InstalledBackend, ...], name: str) -> InstalledBackend | None:
    """The concrete, usable backend behind a directory or meta name, as a node reported it."""
    by_name = {backend.name: backend for backend in backends}
    found = by_name.get(name)
    if found is not None and found.is_meta:
        found = by_name.get(found.meta_backend_for)
    return None if found is None or found.is_broken or found.is_meta else found
