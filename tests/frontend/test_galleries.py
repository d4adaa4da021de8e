"""The operator's catalogue: what is offered, how fresh it is, and which build each node gets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.core.localai import INDEX, needs_index
from tests.frontend.world import GALLERY

from enginehouse.core.capacity import Capacity
from enginehouse.core.errors import NotFound, Unavailable
from enginehouse.core.gallery_source import GallerySource
from enginehouse.core.ids import NodeId
from enginehouse.core.node import Node
from enginehouse.core.report import Report
from enginehouse.fetch.galleries.sources import Sources
from enginehouse.fetch.http.addresses import Rules
from enginehouse.fetch.http.client import Client
from enginehouse.frontend.galleries import Galleries

NODE = Node(
    id=NodeId("1"),
    name="first",
    node_type="backend",
    public_key="",
    approved=True,
    health="healthy",
    drained=False,
    address="",
    http_address="",
    capability="default",
    platform="linux/amd64",
    labels={},
    max_replicas_per_model=1,
    capacity=Capacity(),
    created_at=0.0,
    updated_at=0.0,
    last_heartbeat=0.0,
    report=Report(),
)
GPU = replace(NODE, id="2", name="second", capability="nvidia-cuda-13")


class World:
    """A catalogue over one gallery in a file, and a clock."""

    def __init__(self, tmp_path: Path) -> None:
        self.file = tmp_path / "index.yaml"
        self.now = 1000.0
        self._directory = tmp_path / "galleries"
        self._client = Client(Rules())
        self.galleries = self.make()

    def make(self) -> Galleries:
        source = GallerySource(name="far", url=f"file://{self.file}")
        sources = Sources((source,), self._client, self._directory, now=lambda: self.now)
        return Galleries([GALLERY], sources)

    async def write(self, document: str) -> None:
        self.file.write_text(document)
        self.now += 10
        await self.galleries.step()

    def states(self) -> list[str]:
        return [f"{state.name} {state.status}" for state in self.galleries.states()]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    await made.galleries.close()


async def test_the_catalogue_works_before_anything_was_fetched_and_grows_when_it_is(world: World) -> None:
    await world.galleries.restore()
    assert world.states() == ["builtin built-in", "far never loaded"]
    assert world.galleries.resolve("llama-cpp", NODE).directory == "engine"
    with pytest.raises(Unavailable, match="far is being fetched"):
        world.galleries.resolve_each("new", [NODE])
    with pytest.raises(NotFound):
        world.galleries.resolve_each("builtin@new", [NODE])
    await world.write("- {name: new, uri: h/new:1}")
    assert world.states() == ["builtin built-in", "far fresh"]
    assert world.galleries.resolve("new", NODE).source == "far"
    again = world.make()
    await again.restore()
    assert again.resolve("new", NODE).source == "far"


async def test_a_gallery_that_breaks_is_served_from_its_copy_and_marked(world: World) -> None:
    await world.write("- {name: new, uri: h/new:1}\n- {name: ../bad}")
    assert [offer.is_stale for offer in world.galleries.offers([NODE])] == [False] * 5
    await world.write("- {")
    state = world.galleries.states()[1]
    assert (state.status, state.age_seconds, state.entries) == ("stale", 10.0, 1)
    assert state.error.startswith("cannot read the gallery far")
    assert [skipped.entry for skipped in state.skipped] == ["../bad"]
    offers = {offer.entry.name: offer for offer in world.galleries.offers([NODE])}
    assert (offers["new"].is_stale, offers["engine"].is_stale) == (True, False)
    assert world.galleries.resolve("new", NODE).uri == "h/new:1"


async def test_an_offer_says_whether_some_node_can_take_it(world: World) -> None:
    await world.write(
        "- {name: tool, capabilities: {nvidia: cuda12-tool}}\n- {name: cuda12-tool, uri: h/t:1}\n"
        "- {name: plain, uri: h/p}"
    )

    def fitting(*nodes: Node) -> set[str]:
        return {offer.entry.name for offer in world.galleries.offers(nodes) if offer.fits}

    assert fitting() == set()
    assert fitting(NODE) == {"llama-cpp", "engine", "other", "plain"}
    assert fitting(GPU) - fitting(NODE) == {"cuda-only", "tool", "cuda12-tool"}
    assert fitting(NODE, GPU) == fitting(NODE) | fitting(GPU)
    variants = {offer.entry.name for offer in world.galleries.offers(()) if offer.is_variant}
    assert variants == {"engine", "cuda12-tool"}
    await world.write("- {name: plain, uri: h/p, platforms: [linux/s390x]}")
    assert "plain" not in fitting(NODE)


async def test_each_node_gets_its_own_build_or_its_own_reason(world: World) -> None:
    await world.write(
        "- {name: tool, capabilities: {nvidia: cuda12-tool}}\n- {name: cuda12-tool, uri: h/t:1, alias: spade}"
    )
    builds, reasons = world.galleries.resolve_each("tool", [NODE, GPU])
    assert {node: build.directory for node, build in builds.items()} == {"2": "cuda12-tool"}
    assert "none for default" in reasons[NodeId("1")]
    builds, reasons = world.galleries.resolve_each("spade", [NODE, GPU])
    assert set(builds) == {"2"}
    assert "NVIDIA" in reasons[NodeId("1")]
    assert world.galleries.explain("tool", GPU).reasons == ("capability nvidia-cuda-13 → key nvidia → cuda12-tool",)


@needs_index
async def test_the_real_index_is_offered_with_what_fits(world: World) -> None:
    await world.write(INDEX.read_text())
    offers = world.galleries.offers([NODE])
    assert len(offers) == 1028 + len(GALLERY.backends)
    shown = [offer for offer in offers if offer.fits and not offer.is_variant and not offer.entry.is_development]
    assert 60 < len(shown) < 90
    assert world.galleries.resolve("llama-cpp", GPU).source == "builtin"
    assert world.galleries.resolve("far@llama-cpp", GPU).directory == "cuda13-llama-cpp"
