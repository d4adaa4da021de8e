"""Which nodes models may have: found once per selector and backend, not per model, and kept while the galleries are the
same, and what decides it of the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from enginehouse.core.backend import Resolved
from enginehouse.core.errors import NotFound, Unavailable
from enginehouse.core.ids import NodeId
from enginehouse.core.node import Node
from enginehouse.core.placement import selects
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.localai.builds import builds_for

Selector = tuple[tuple[str, str], ...]


class Matches:
    def __init__(self, nodes: Sequence[Node], galleries: Galleries, *, has_carrier: bool) -> None:
        self._nodes = nodes
        self._galleries = galleries
        self._has_carrier = has_carrier
        self._builds: dict[str, Mapping[NodeId, Resolved]] = {}
        self._selected: dict[Selector, list[NodeId]] = {}
        self._matching: dict[tuple[Selector, str], list[NodeId]] = {}
        self._schedulable = {node.id for node in nodes if node.is_schedulable}

    def builds(self, backend: str) -> Mapping[NodeId, Resolved]:
        if backend not in self._builds:
            try:
                found, _ = builds_for(self._galleries, backend, self._nodes, has_carrier=self._has_carrier)
            except (NotFound, Unavailable):
                found = {}  # the load says so
            self._builds[backend] = found
        return self._builds[backend]

    def selected(self, selector: Mapping[str, str]) -> Sequence[NodeId]:
        key = tuple(sorted(selector.items()))
        if key not in self._selected:
            self._selected[key] = [node.id for node in self._nodes if selects(selector, node)]
        return self._selected[key]

    def matching(self, selector: Mapping[str, str], backend: str) -> Sequence[NodeId]:
        key = tuple(sorted(selector.items())), backend
        if key not in self._matching:
            builds = self.builds(backend)
            self._matching[key] = [
                node_id for node_id in self.selected(selector) if node_id in self._schedulable and node_id in builds
            ]
        return self._matching[key]
