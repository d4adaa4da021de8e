"""Where the symbolic links of a finished tree really lead.

A link is first judged by its text, which can lie in one way: an upward step after a name that is itself a link. Such
links are walked here, in the tree as it has become, step by step and without ever leaving it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from enginehouse.core.archive import MAX_COMPONENT, unsafe
from enginehouse.core.name import shown
from enginehouse.worker.handles import Handles

_MAX_STEPS = 1_000_000  # over all links of a tree; a real one has a few links of a few steps
_MAX_LINKS = 40  # on one way, as the kernel has it


class LinkCheck:
    def __init__(self, handles: Handles) -> None:
        self._handles = handles
        self._steps = 0

    def check(self, paths: Iterable[str]) -> None:
        """Raises if one of these leads out of the tree. One that leads nowhere does not."""
        for path in paths:
            if not self._stays_inside(path):
                raise unsafe(f"the link {shown(path)} leads out of the tree, by way of another link")

    def _stays_inside(self, path: str) -> bool:
        parent, _, name = path.rpartition("/")
        where, ahead, met = parent.split("/") if parent else [], [name], 0
        while ahead:
            self._steps += 1
            if self._steps > _MAX_STEPS:
                raise unsafe("its links are too entangled to be followed")
            step = ahead.pop()
            if step == "..":
                if not where:
                    return False
                where.pop()
            elif step not in ("", "."):
                target = self._target(where, step)
                if target is None:
                    return True  # nothing is there, so nothing is reached
                if not target:
                    where.append(step)
                    continue
                met += 1
                if met > _MAX_LINKS or target.startswith("/"):
                    return True  # the kernel gives up; an absolute one was allowed by who trusts the source
                ahead.extend(reversed(target.split("/")))
        return True

    def _target(self, where: list[str], name: str) -> str | None:
        """Of a link; "" for what is none, None for what is not there."""
        if len(os.fsencode(name)) > MAX_COMPONENT:
            return None
        try:
            directory = self._handles.get("/".join(where), make=False)
            if stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                return os.readlink(name, dir_fd=directory)
            return ""
        except FileNotFoundError:
            return None
