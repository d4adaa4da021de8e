"""The operator's catalogue: the configured galleries in their order, the built-in one first, and the choice of a
build for a node.
"""

from __future__ import annotations

from collections.abc import Iterable

from enginehouse.core import gallery
from enginehouse.core.backend import Resolved
from enginehouse.core.errors import Hopeless
from enginehouse.core.gallery import Entry, Gallery
from enginehouse.core.model import Model
from enginehouse.core.node import Node


class Galleries:
    def __init__(self, galleries: Iterable[Gallery]) -> None:
        self._galleries = tuple(galleries)

    def entries(self) -> list[tuple[Gallery, Entry]]:
        return [(one, entry) for one in self._galleries for entry in one.backends]

    def models(self) -> list[Model]:
        return [model for one in self._galleries for model in one.models]

    def model(self, name: str) -> Model | None:
        return gallery.find_model(self._galleries, name)

    def known(self, name: str) -> Entry:
        """The entry of that name; `NotFound` where no gallery has it."""
        return gallery.find_entry(self._galleries, name)[1]

    def directories(self, name: str) -> set[str]:
        """Every directory that a name may stand for: its own, and those of the builds it points to."""
        entry = self.known(name)
        return set(entry.capabilities.values()) if entry.is_meta else {entry.name}

    def resolve(self, name: str, node: Node) -> Resolved:
        return gallery.resolve(self._galleries, name, node.capability, node.platform)

    def resolve_each(self, name: str, nodes: Iterable[Node]) -> tuple[dict[str, Resolved], dict[str, str]]:
        """The build for each node that has one, and the reason for each that has none; `NotFound` for an unknown
        name.
        """
        self.known(name)
        builds: dict[str, Resolved] = {}
        reasons: dict[str, str] = {}
        for node in nodes:
            try:
                builds[node.id] = self.resolve(name, node)
            except Hopeless as error:
                reasons[node.id] = error.message
        return builds, reasons
