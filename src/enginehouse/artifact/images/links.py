"""The symbolic links of a tree that is being built: their targets, and the check that none leaves the tree.

Links are kept in memory, so that a path is resolved without following links on disk; the resolved path is still
walked by handles that follow none. A link is checked by its text when it is created, and through all other links when
the tree is complete. Cycles are allowed, because they lead nowhere. Chains beyond the kernel's limit are refused,
because other programs follow them further.
"""

from __future__ import annotations

from msgspec import Struct

from enginehouse.core.archive import check_path, check_symlink, not_allowed, too_large
from enginehouse.core.errors import Hopeless
from enginehouse.core.name import shown

_MAX_STEPS = 2_000_000  # over all links and paths of a tree; real trees need some ten thousand
_MAX_LINKS = 40  # in one path, the limit of the kernel
_MAX_TEXT_BYTES = 64 * 1024 * 1024


class _End(Struct, frozen=True):
    """The final target of a link, and the number of links on the path to it, itself included."""

    path: tuple[str, ...]
    links: int


class Links:
    """All links of a tree. Paths are canonical, without links, and relative to the root."""

    def __init__(self) -> None:
        self._targets: dict[str, str] = {}
        self._absolute: dict[str, str] = {}  # original targets of links that were made relative
        self._text_bytes = 0
        self._steps = 0

    def __contains__(self, path: str) -> bool:
        return path in self._targets

    def add(self, path: str, target: str) -> str:
        """Register a link before its creation. Returns the target to write."""
        text = check_symlink(path, target)
        self._text_bytes += len(text)
        if self._text_bytes > _MAX_TEXT_BYTES:
            raise too_large(f"its links have more than {_MAX_TEXT_BYTES // 2**20} MiB of text")
        self._targets[path] = text
        if target.startswith("/"):
            self._absolute[path] = target
        return text

    def discard(self, path: str) -> None:
        if self._targets.pop(path, None) is not None:
            self._absolute.pop(path, None)

    def target_of_link(self, path: str) -> str:
        """The target as the image states it."""
        return self._absolute.get(path) or self._targets[path]

    def resolve(self, path: str) -> str:
        """Return the real path of a directory inside the root. All links are followed, the last component included."""
        if not self._targets:
            return path
        where: list[str] = []
        ahead, met = path.split("/")[::-1], 0
        while ahead:
            step = ahead.pop()
            if step == "..":
                if not where:
                    raise not_allowed(f"{shown(path)} leads out of the tree through a link")
                where.pop()
            elif step not in ("", "."):
                where.append(step)
                target = self._targets.get("/".join(where))
                if target is not None:
                    where.pop()
                    met += 1
                    if met > _MAX_LINKS:
                        raise not_allowed(f"the path {shown(path)} goes through more than {_MAX_LINKS} links")
                    ahead.extend(reversed(target.split("/")))
            if met:
                self._count()
        return check_path("/".join(where)) if met else path

    def check(self) -> None:
        """Raise if a link of the complete tree leaves the tree or goes through more links than the kernel follows."""
        ends: dict[str, _End | None] = {}
        for path in self._targets:
            self._end(path, ends, [])

    def _end(self, path: str, ends: dict[str, _End | None], way: list[str]) -> _End | None:
        """The end of a link, or None if it is in a cycle. `way` are the links being followed."""
        if path in ends:
            return ends[path]
        if path in way:
            return None
        if len(way) >= _MAX_LINKS:
            raise _too_long(way[0])
        where, met = path.split("/")[:-1], 1
        found: _End | None = None
        for step in self._targets[path].split("/"):
            self._count()
            if step == "..":
                if not where:
                    raise not_allowed(f"the link {shown(path)} leads out of the tree through another link")
                where.pop()
            elif step not in ("", "."):
                where.append(step)
                inner = "/".join(where)
                if inner in self._targets:
                    found = self._end(inner, ends, [*way, path])
                    if found is None:
                        break
                    where, met = list(found.path), met + found.links
                    if met > _MAX_LINKS:
                        raise _too_long(path)
        else:
            found = _End(tuple(where), met)
        ends[path] = found
        return found

    def _count(self) -> None:
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise not_allowed(f"its links take more than {_MAX_STEPS} steps to resolve")


def _too_long(path: str) -> Hopeless:
    return not_allowed(f"the link {shown(path)} goes through more than {_MAX_LINKS} others")
