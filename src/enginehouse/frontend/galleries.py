"""The catalogue of this frontend: the built-in gallery, then the configured ones in their order. Chooses the build of a
backend for a node.

Lookups use the galleries in memory; only `step` reads from outside. The catalogue is replaced as a whole, so a
transaction in another thread sees either the old or the new one, never a mixture.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from enginehouse.core import gallery
from enginehouse.core.backend import Resolved
from enginehouse.core.errors import EnginehouseError, Hopeless
from enginehouse.core.gallery import Catalogue, Choice
from enginehouse.core.gallery_entry import Gallery, GalleryEntry, GalleryState
from enginehouse.core.gallery_source import encode_sources
from enginehouse.core.ids import NodeId
from enginehouse.core.model import Model
from enginehouse.core.node import Node
from enginehouse.fetch.galleries.sources import Sources

STEP_SECONDS = 5.0  # between two checks for a source that is due for a refresh; a check alone sends nothing


class Offer(Struct, frozen=True, kw_only=True):
    """A gallery entry for display: `is_variant` if a meta entry leads to it, `fits` if some machine can use it,
    `is_stale` if the last refresh of its gallery failed.
    """

    gallery: str
    entry: GalleryEntry
    is_variant: bool
    fits: bool
    is_stale: bool


class Galleries:
    def __init__(self, galleries: Iterable[Gallery], sources: Sources | None = None) -> None:
        self._own = tuple(galleries)
        self._sources = sources
        self._encoded = encode_sources(sources.configured) if sources is not None and sources.configured else ""
        self._catalogue = Catalogue(self._own)
        self._fitting: dict[tuple[str, str], set[tuple[str, str]]] = {}
        self._gather()

    @property
    def encoded(self) -> str:
        """The configured galleries as LocalAI's workers read them, without the built-in one: they cannot use it."""
        return self._encoded

    @property
    def edition(self) -> object:
        """Another object after any change of the catalogue."""
        return self._catalogue

    async def restore(self) -> None:
        """Load the galleries saved by an earlier run, so that a restart keeps the catalogue."""
        if self._sources is not None:
            await self._sources.restore()
            self._gather()

    async def step(self) -> None:
        if self._sources is not None:
            await self._sources.refresh(self._gather)

    async def close(self) -> None:
        if self._sources is not None:
            await self._sources.close()

    def states(self) -> list[GalleryState]:
        own = [
            GalleryState(name=one.name, url=one.url, status="built-in", entries=len(one.backends), skipped=one.skipped)
            for one in self._own
        ]
        return [*own, *(self._sources.states if self._sources is not None else ())]

    def entries(self) -> list[tuple[Gallery, GalleryEntry]]:
        return list(self._catalogue.entries())

    def offers(self, nodes: Iterable[Node]) -> list[Offer]:
        """Return every entry, in the order of the galleries; `fits` is judged by the machines in `nodes`."""
        catalogue = self._catalogue
        machines = {(node.capability, node.platform) for node in nodes}
        fitting = set().union(*(self._fitting_on(catalogue, *machine) for machine in machines))
        stale = {state.name for state in self.states() if state.status == "stale"}
        variants = catalogue.variants()
        return [
            Offer(
                gallery=one.name,
                entry=entry,
                is_variant=entry.name in variants,
                fits=(one.name, entry.name) in fitting,
                is_stale=one.name in stale,
            )
            for one, entry in catalogue.entries()
        ]

    def models(self) -> list[Model]:
        return [model for one in self._catalogue.galleries for model in one.models]

    def model(self, name: str) -> Model | None:
        return gallery.find_model(self._catalogue.galleries, name)

    def known(self, name: str) -> list[GalleryEntry]:
        """Return the entries that a name stands for; raises `NotFound` if no gallery has it."""
        return [entry for _, entry in self._catalogue.builds(name)]

    def has(self, name: str) -> bool:
        """Whether one of the loaded galleries has a backend of that name."""
        try:
            return bool(self.known(name))
        except EnginehouseError:
            return False

    def metas_of(self, name: str) -> list[str]:
        """Return the meta entries that lead to this entry; empty unless it is a build for one kind of hardware."""
        plain = name.rpartition("@")[2]
        return [
            entry.name
            for _, entry in self._catalogue.entries()
            if entry.is_meta and plain in entry.capabilities.values() and entry.name != plain
        ]

    def resolve(self, name: str, node: Node) -> Resolved:
        return self.explain(name, node).resolved

    def explain(self, name: str, node: Node) -> Choice:
        return self._catalogue.explain(name, node.capability, node.platform)

    def resolve_each(self, name: str, nodes: Iterable[Node]) -> tuple[dict[NodeId, Resolved], dict[NodeId, str]]:
        """Return the build or the reason for each node. Raises `NotFound` for an unknown name."""
        self.known(name)
        builds: dict[NodeId, Resolved] = {}
        reasons: dict[NodeId, str] = {}
        found: dict[tuple[str, str], Resolved | str] = {}  # many nodes are machines of one kind
        for node in nodes:
            machine = (node.capability, node.platform)
            if machine not in found:
                found[machine] = self._resolve_or_reason(name, node)
            one = found[machine]
            if isinstance(one, str):
                reasons[node.id] = one
            else:
                builds[node.id] = one
        return builds, reasons

    def _resolve_or_reason(self, name: str, node: Node) -> Resolved | str:
        try:
            return self.resolve(name, node)
        except Hopeless as error:
            return error.message

    def _gather(self) -> None:
        galleries = (*self._own, *(self._sources.galleries if self._sources is not None else ()))
        if galleries != self._catalogue.galleries:
            self._catalogue = Catalogue(galleries)
            self._fitting = {}

    def _fitting_on(self, catalogue: Catalogue, capability: str, platform: str) -> set[tuple[str, str]]:
        """Return the entries that a machine can use; computed once per version of the catalogue."""
        fitting = self._fitting
        key = (capability, platform)
        if key not in fitting:
            fitting[key] = {
                (one.name, entry.name)
                for one, entry in catalogue.entries()
                if _fits(catalogue, f"{one.name}@{entry.name}", capability, platform)
            }
        return fitting[key]


def _fits(catalogue: Catalogue, name: str, capability: str, platform: str) -> bool:
    try:
        catalogue.explain(name, capability, platform)
    except EnginehouseError:
        return False
    return True
