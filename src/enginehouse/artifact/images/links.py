"""The symbolic links of a tree that is being made: where they lead, and that none leads out.

Kept in memory, so that a path can be resolved without asking the disk to follow anything: whoever writes still walks
the resolved path by handles that follow no link. A link is judged by its text when it is made, and by way of all the
others when the tree is complete. A link in a circle leads nowhere and is harmless; a chain that the kernel would give
up is not, because other programs follow it further.
"""

from __future__ import annotations

from msgspec import Struct

from enginehouse.core.archive import check_path, check_symlink, not_allowed, too_large
from enginehouse.core.errors import Hopeless
from enginehouse.core.name import shown

_MAX_STEPS = 2_000_000  # of the links of a tree and of the paths through them; a real tree has some ten thousand
_MAX_LINKS = 40  # on one way, as the kernel has it
_MAX_TEXT_BYTES = 64 * 1024 * 1024


class _End(Struct, frozen=True):
    """Where a link leads in the end, and how many links are on the way, itself included."""

    path: tuple[str, ...]
    links: int


class Links:
    """Paths are canonical, of real directories, and relative to the root."""

    def __init__(self) -> None:
        self._targets: dict[str, str] = {}
        self._absolute: dict[str, str] = {}  # what was made relative, as the image says it
        self._text_bytes = 0
        self._steps = 0

    def __contains__(self, path: str) -> bool:
        return path in self._targets

    def add(self, path: str, target: str) -> str:
        """A link that is about to be made; what to write into it."""
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

    def said_by(self, path: str) -> str:
        """The target as the image has it."""
        return self._absolute.get(path) or self._targets[path]

    def resolve(self, path: str) -> str:
        """The real path of a directory: every link on the way followed, the last one included, inside the root."""
        if not self._targets:
            return path
        where: list[str] = []
        ahead, met = path.split("/")[::-1], 0
        while ahead:
            step = ahead.pop()
            if step == "..":
                if not where:
                    raise not_allowed(f"{shown(path)} leads out of the tree, by way of a link")
                where.pop()
            elif step not in ("", "."):
                where.append(step)
                target = self._targets.get("/".join(where))
                if target is not None:
                    where.pop()
                    met += 1
                    if met > _MAX_LINKS:
                        raise not_allowed(f"{shown(path)} has more than {_MAX_LINKS} links on its way")
                    ahead.extend(reversed(target.split("/")))
            if met:
                self._count()
        return check_path("/".join(where)) if met else path

    def check(self) -> None:
        """Raises if a link of the complete tree leads out of it, or further than the kernel follows."""
        ends: dict[str, _End | None] = {}
        for path in self._targets:
            self._end(path, ends, [])

    def _end(self, path: str, ends: dict[str, _End | None], way: list[str]) -> _End | None:
        """None for a link in a circle. `way` are the links that are being followed."""
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
                    raise not_allowed(f"the link {shown(path)} leads out of the tree, by way of another link")
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
            raise not_allowed("its links are too entangled to be followed")


def _too_long(path: str) -> Hopeless:
    return not_allowed(f"the link {shown(path)} leads through more than {_MAX_LINKS} others")
