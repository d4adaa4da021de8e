"""What an archive may contain: limits, and the rules for names and links. Pure, so that each rule can be tested alone.

A path that passes `check_path` is inside the tree regardless of the file system; the writer must still walk it without
following links. Every refusal is `unsafe_archive` or `archive_too_large`. The message distinguishes broken or hostile
archives from those that other tools may write and our rules refuse.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from enginehouse.core.errors import Hopeless
from enginehouse.core.name import shown

EntryKind = Literal["file", "directory", "symlink", "hardlink"]
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
MAX_PATH = 4096
MAX_COMPONENT = 255
MAX_DEPTH = 64
GIB = 1024**3


class ArchiveLimits(Struct, frozen=True, kw_only=True):
    """Counted over all layers while reading, so that an archive bomb costs at most the limit."""

    total_bytes: int = 20 * GIB
    entries: int = 100_000
    ratio: int = 200
    # A small tar of zeros may be legitimate; beyond this size the ratio applies.
    ratio_free_bytes: int = 10 * 1024 * 1024


class TarEntry(Struct, frozen=True, kw_only=True):
    path: str
    kind: EntryKind
    size_bytes: int = 0
    mode: int = 0o644
    mtime_ns: int = 0
    target: str = ""  # of a link
    attributes: tuple[str, ...] = ()  # extended attributes with a meaning for the kernel; they are dropped


def unsafe(what: str) -> Hopeless:
    return Hopeless(f"cannot unpack the archive: {what}; it is broken or hostile", code="unsafe_archive")


def not_allowed(what: str) -> Hopeless:
    """For archives that other tools may write or accept: only our rules refuse them."""
    return Hopeless(
        f"cannot unpack the archive: {what}; this is not allowed here, see docs/installing.md, What is refused",
        code="unsafe_archive",
    )


def too_large(what: str) -> Hopeless:
    return Hopeless(f"cannot unpack the archive: {what}", code="archive_too_large")


def check_path(raw: str) -> str:
    """Return the canonical form of an entry's path, "" for the root; raise if it could lead outside the tree."""
    if "\0" in raw:
        raise unsafe(f"the path {shown(raw)} contains a NUL")
    if len(raw) > MAX_COMPONENT and _bytes(raw) > MAX_PATH:
        raise not_allowed(f"a path has {_bytes(raw)} bytes, at most {MAX_PATH} are allowed")
    if raw.startswith("/"):
        raise not_allowed(f"the path {shown(raw)} is absolute")
    parts = [part for part in raw.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise not_allowed(f"the path {shown(raw)} leads upwards")
    if len(parts) > MAX_DEPTH:
        raise not_allowed(f"a path is {len(parts)} levels deep, at most {MAX_DEPTH} are allowed")
    for part in parts:
        if len(part) > 63 and _bytes(part) > MAX_COMPONENT:
            raise not_allowed(f"a name has more than {MAX_COMPONENT} bytes")
    return "/".join(parts)


def check_symlink(path: str, target: str) -> str:
    """Return the target to write for the link at `path`; an absolute one, from the root of the tree, made relative.

    Only the text is checked. `artifact.images.links` checks where a chain of links leads.
    """
    if not target or "\0" in target or _bytes(target) >= MAX_PATH:
        raise unsafe(f"the link {shown(path)} has no usable target")
    text = relative_to_root(path, target) if target.startswith("/") else target
    if _bytes(text) >= MAX_PATH:
        raise not_allowed(f"the target of the link {shown(path)} has more than {MAX_PATH} bytes")
    depth = path.count("/")
    for part in text.split("/"):
        if part == "..":
            depth -= 1
            if depth < 0:
                raise not_allowed(f"the link {shown(path)} leads out of the tree, to {shown(target)}")
        elif part not in ("", "."):
            depth += 1
    return text


def relative_to_root(path: str, target: str) -> str:
    """The relative form of an absolute target for a link at `path`. The parent of the root is the root."""
    steps = [part for part in target.split("/") if part not in ("", ".")]
    while steps and steps[0] == "..":
        del steps[0]
    return "/".join([".."] * path.count("/") + steps) or "."


def kept_mode(mode: int) -> int:
    """Permission bits. Set-id bits refer to the file's owner in the image, which is not kept, so they are dropped."""
    return mode & 0o1777


def whiteout_target(name: str) -> str | None:
    """The name that a whiteout hides, "" for everything in its directory, None if `name` is not a whiteout."""
    if not name.startswith(WHITEOUT):
        return None
    if name == OPAQUE:
        return ""
    hidden = name.removeprefix(WHITEOUT)
    if hidden in ("", ".", ".."):
        raise unsafe(f"the whiteout {shown(name)} has no valid target")
    return hidden


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))
