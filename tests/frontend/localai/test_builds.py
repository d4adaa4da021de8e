"""What a LocalAI worker can run: images that speak LocalAI's protocol, of any gallery but the built-in one."""

from __future__ import annotations

import pytest
from tests.frontend.world import World

from enginehouse.core.action import InstallBackend
from enginehouse.core.gallery_entry import Gallery, GalleryEntry
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.localai.builds import builds_for, install_for

GALLERIES = Galleries(
    (
        Gallery(
            name="images",
            url="https://images.example/index.yaml",
            backends=(
                GalleryEntry(name="image", uri="registry.example/image:latest"),
                GalleryEntry(name="http-image", uri="registry.example/http:latest", protocol="openai-http"),
                GalleryEntry(name="package", uri="pypi:package==1"),
                GalleryEntry(name="family", capabilities={"default": "image"}),
            ),
        ),
    )
)


@pytest.mark.parametrize(
    ("name", "is_run"), [("image", True), ("family", True), ("http-image", False), ("package", False)]
)
async def test_only_images_of_localai_s_protocol_are_for_localai_s_workers(
    world: World, name: str, is_run: bool
) -> None:
    ours, go = await world.join("ours"), await world.join("go", is_localai=True)
    builds, reasons = builds_for(GALLERIES, name, [ours, go], has_carrier=True)
    assert (set(builds), set(reasons)) == (({ours.id, go.id}, set()) if is_run else ({ours.id}, {go.id}))
    builds, _ = builds_for(GALLERIES, name, [ours, go], has_carrier=False)
    assert set(builds) == {ours.id}


async def test_a_load_installs_the_build_by_its_own_name_and_with_the_galleries(world: World) -> None:
    ours, go = await world.join("ours"), await world.join("go", is_localai=True)
    builds, _ = builds_for(GALLERIES, "images@family", [ours, go], has_carrier=True)
    plain = InstallBackend(backend="images@family", resolved=builds[go.id], keep=True)
    assert install_for(plain, ours, "[]") is plain
    sent = install_for(plain, go, "[…]")
    assert (sent.backend, sent.resolved.meta, sent.galleries, sent.keep) == ("image", "", "[…]", True)
