"""From a registry to a tree on disk, through a proxy with misfortunes: right in the end, or an honest refusal."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from tests.fetch.faults import Answer, Cut, Drop, Extra, Fault, Flip, IgnoreRange, Short, WrongLength
from tests.fetch.images import OCI_INDEX, Image, write_image, write_index
from tests.worker.shelf import Shelf, launcher, noise, said_by, tree_of

from enginehouse.artifact.blobs import partial
from enginehouse.core.errors import EnginehouseError, Hopeless, NotFound
from enginehouse.host import hardware

PART_BYTES = 128 * 1024
LAYERS = [{"run.sh": launcher("one"), "lib/a.so": noise(500_000, 1)}, {"lib/b.so": noise(300_000, 2)}]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "PART_BYTES", PART_BYTES)


@pytest.fixture
async def image(one: Shelf) -> Image:
    return await one.publish("engine:1", LAYERS)


def is_right(one: Shelf) -> bool:
    tree = tree_of(one.tree)
    contents = {name: content for name, (_, content) in tree.items() if name != "lib"}
    return contents == LAYERS[0] | LAYERS[1] and said_by(one.tree) == "one" and not one.residue()


async def refused(one: Shelf, kind: type[EnginehouseError]) -> EnginehouseError:
    with pytest.raises(kind) as caught:
        await one.install(one.request("engine:1"))
    assert not one.tree.exists()
    assert not one.residue()
    return caught.value


async def test_an_image_becomes_a_tree_and_its_blobs_are_kept(one: Shelf, image: Image) -> None:
    installed = await one.install(one.request("engine:1"))
    assert is_right(one)
    assert installed.digest == one.metadata().digest == image.digest
    assert installed.fetched_bytes == sum(layer.size_bytes for layer in image.layers)
    assert one.blobs() == sorted(layer.digest.removeprefix("sha256:") for layer in image.layers)
    assert one.metadata().fetched_from == ""


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        (Cut(after_bytes=50_000), 9),
        (Short(missing_bytes=10), 3),
        (Extra(added_bytes=10), 3),
        (WrongLength(difference_bytes=1000), 3),
        (WrongLength(difference_bytes=-10), 3),
        (Answer(status=503), 3),
        (Answer(status=500), 2),
        (Drop(), 3),
    ],
)
async def test_a_passing_misfortune_costs_time_and_nothing_else(
    one: Shelf, image: Image, fault: Fault, times: int
) -> None:
    """F-100."""
    one.proxy.plan(fault, path=image.layers[0].digest, times=times)
    await one.install(one.request("engine:1"))
    assert is_right(one)
    assert len(one.proxy.asked(image.layers[0].digest)) > times


async def test_a_line_that_breaks_all_the_time_is_not_given_up_while_it_moves(one: Shelf, image: Image) -> None:
    one.proxy.plan(Cut(after_bytes=10_000), path=image.layers[0].digest, times=None)
    await one.install(one.request("engine:1"))
    assert is_right(one)
    # Each byte once: what came before a break is kept.
    assert one.proxy.bytes_sent(image.layers[0].digest) == image.layers[0].size_bytes


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_a_server_that_ignores_ranges_gives_the_same_tree(one: Shelf, image: Image, after: int) -> None:
    """F-100."""
    one.proxy.plan(IgnoreRange(), path="blobs", times=None, after=after)
    await one.install(one.request("engine:1"))
    assert is_right(one)


async def test_a_busy_server_is_asked_again_when_it_said(one: Shelf, image: Image) -> None:
    """F-100."""
    times: list[float] = []
    one.proxy.on_request = lambda request: times.append(time.monotonic()) if "/manifests/1" in request.path else None
    one.proxy.plan(Answer(status=429, headers={"retry-after": "30"}), path="manifests", times=1)
    one.proxy.plan(Answer(status=429, headers={"retry-after": "30"}), path=image.layers[1].digest, times=1)
    await one.install(one.request("engine:1"))
    assert is_right(one)
    # Thirty seconds, a hundred times faster.
    assert times[1] - times[0] >= 0.3


async def test_a_token_that_expires_on_the_way_is_replaced(one: Shelf, image: Image) -> None:
    """F-100."""
    tokens = one.proxy.ask_for_tokens()

    def expire(request: object) -> None:
        if len(one.proxy.asked("blobs")) == 4:
            tokens.valid.clear()

    one.proxy.on_request = expire
    await one.install(one.request("engine:1"))
    assert is_right(one)
    assert tokens.given >= 2


@pytest.mark.parametrize("position", [0, 300_000])
async def test_a_changed_byte_is_found_and_nothing_of_it_stays(one: Shelf, image: Image, position: int) -> None:
    """F-099."""
    one.proxy.plan(Flip(at_byte=position), path=image.layers[0].digest, times=None)
    error = await refused(one, Hopeless)
    assert error.code == "digest_mismatch"
    assert not [name for name in one.blobs() if name.startswith(image.layers[0].digest.removeprefix("sha256:"))]
    one.proxy.forget_plans()
    await one.install(one.request("engine:1"))
    assert is_right(one)


async def test_a_changed_byte_in_a_manifest_or_configuration_is_found(one: Shelf, image: Image) -> None:
    """F-099."""
    for path in ("manifests", image.config.digest):
        one.proxy.plan(Flip(at_byte=20), path=path, times=None)
        assert (await refused(one, Hopeless)).code == "digest_mismatch"
        one.proxy.forget_plans()


@pytest.mark.parametrize("path", ["blobs", "manifests"])
async def test_a_mirror_with_the_right_bytes_is_used_where_the_first_has_wrong_ones(
    one: Shelf, image: Image, path: str
) -> None:
    """F-099."""
    one.proxy.plan(Flip(at_byte=30), path=path, times=None)
    mirror = one.registry.reference(one.named("engine:1"))
    await one.install(one.request("engine:1", mirrors=(mirror,), digest=image.digest))
    assert is_right(one)
    assert one.metadata().fetched_from == mirror


def sent_to(where: str) -> Answer:
    return Answer(status=302, headers={"location": where})


# What a place may say that is not about the image: it is closed, moved to where nobody may go, or a page for people.
ELSEWHERE = {
    "401": Answer(status=401),
    "401 for a token from where nobody may go": Answer(
        status=401, headers={"www-authenticate": 'Bearer realm="http://192.168.7.7/token",service="x"'}
    ),
    "403": Answer(status=403),
    "400": Answer(status=400),
    "451": Answer(status=451),
    "to an address that is not allowed": sent_to("http://192.168.7.7/login"),
    "to something that is no address": sent_to("ftp://example.org/x"),
    "in a circle": sent_to("/v2/round/manifests/1"),
    "a page": Answer(body=b"<html>please sign in</html>", headers={"content-type": "text/html"}),
}


@pytest.mark.parametrize("kind", ELSEWHERE)
@pytest.mark.parametrize("what", ["everything", "blobs"])
async def test_a_first_place_that_is_closed_or_sends_us_elsewhere_gives_way_to_a_mirror(
    one: Shelf, image: Image, kind: str, what: str
) -> None:
    for path in [""] if what == "everything" else [layer.digest for layer in image.layers]:
        one.proxy.plan(ELSEWHERE[kind], path=path, times=None)
    mirror = one.registry.reference(one.named("engine:1"))
    await one.install(one.request("engine:1", mirrors=(mirror,)))
    assert is_right(one)
    assert one.metadata().fetched_from == mirror


async def test_a_first_place_that_may_not_be_asked_gives_way_to_a_mirror(one: Shelf, image: Image) -> None:
    mirror = one.registry.reference(one.named("engine:1"))
    await one.install(one.request("engine:1", uri="192.168.7.7:5000/team/engine:1", mirrors=(mirror,)))
    assert is_right(one)
    assert one.metadata().fetched_from == mirror


@pytest.mark.parametrize("fault", [Drop(), Answer(status=404), Answer(status=403), Answer(status=500)])
async def test_where_the_first_place_is_down_a_mirror_is_used_and_told(one: Shelf, image: Image, fault: Fault) -> None:
    one.proxy.plan(fault, times=None)
    mirror = one.registry.reference(one.named("engine:1"))
    await one.install(one.request("engine:1", mirrors=(mirror,)))
    assert is_right(one)
    assert one.metadata().uri == one.resolved("engine:1").uri
    assert one.metadata().fetched_from == mirror


@pytest.mark.parametrize("fault", [Drop(), Answer(status=404), Answer(status=403), Answer(status=500), Cut(100)])
async def test_blobs_come_from_a_mirror_where_the_first_place_has_only_the_manifest(
    one: Shelf, image: Image, fault: Fault
) -> None:
    for layer in image.layers:
        one.proxy.plan(fault, path=layer.digest, times=None)
    mirror = one.registry.reference(one.named("engine:1"))
    await one.install(one.request("engine:1", mirrors=("127.0.0.1:9/nobody/here", mirror)))
    assert is_right(one)
    assert one.metadata().fetched_from == mirror


async def test_a_tag_that_moves_meanwhile_changes_nothing(one: Shelf, image: Image) -> None:
    """F-103."""
    other = write_image(one.directory / "other", [{"run.sh": launcher("two")}], platform=hardware.platform())
    moved = asyncio.Event()

    def move(request: object) -> None:
        if one.proxy.asked("blobs") and not moved.is_set():
            one.proxy.plan(
                Answer(body=other.document, headers={"content-type": "application/vnd.oci.image.manifest.v1+json"}),
                path="manifests/1",
                times=None,
            )
            moved.set()

    one.proxy.on_request = move
    await one.install(one.request("engine:1"))
    assert moved.is_set()
    assert is_right(one)
    assert one.metadata().digest == image.digest


async def test_another_platform_is_refused_after_one_question(one: Shelf) -> None:
    """F-014."""
    image = await one.publish("engine:1", LAYERS, platform="linux/s390x")
    write_index(image.directory, [image])
    await one.registry.push(image.directory, one.named("engine:1"))
    error = await refused(one, Hopeless)
    assert error.code == "unsupported_platform"
    assert "s390x" in error.message
    assert hardware.platform() in error.message
    assert len(one.proxy.asked("manifests")) == 1
    assert not one.proxy.asked("blobs")


async def test_a_missing_tag_is_never_replaced_by_a_neighbour(one: Shelf, image: Image) -> None:
    """F-104."""
    await one.registry.push(image.directory, one.named("engine:latest"))
    with pytest.raises(NotFound) as caught:
        await one.install(one.request("engine:2"))
    assert caught.value.code == "not_found"
    assert not one.tree.exists()
    assert not one.residue()


@pytest.mark.parametrize("files", [{"readme": b"x"}, {"run.sh": b""}, {"run.sh/x": b"x"}])
async def test_an_image_without_a_launcher_is_no_backend(one: Shelf, files: dict[str, bytes]) -> None:
    await one.publish("engine:1", [files])
    assert (await refused(one, Hopeless)).code == "unsupported"


async def test_a_layer_that_occurs_twice_is_fetched_once(one: Shelf) -> None:
    image = await one.publish("engine:1", [LAYERS[0], LAYERS[1], LAYERS[0]])
    installed = await one.install(one.request("engine:1"))
    assert is_right(one)
    assert installed.fetched_bytes == image.layers[0].size_bytes + image.layers[1].size_bytes
    assert one.proxy.bytes_sent(image.layers[0].digest) == image.layers[0].size_bytes
    assert one.progress[-1] == ("extracting", *[sum(layer.size_bytes for layer in image.layers)] * 2)


@pytest.mark.parametrize("kind", ["file", "layout"])
async def test_an_image_on_this_disk_is_installed_from_where_it_is(one: Shelf, kind: str) -> None:
    image = write_image(one.directory / "image", LAYERS, platform=hardware.platform())
    uri = f"ocifile://{image.directory}" + ("/layout" if kind == "layout" else "")
    if kind == "layout":
        (one.directory / "image" / "layout").symlink_to(image.directory)
    installed = await one.install(one.request("", uri=uri))
    assert is_right(one)
    assert (installed.digest, installed.fetched_bytes) == (image.digest, 0)
    assert not one.blobs()


async def test_an_index_is_remembered_beside_the_platform_it_was_taken_for(one: Shelf) -> None:
    image = await one.publish("engine:1", LAYERS)
    index = write_index(image.directory, [image])
    await one.registry.push(image.directory, one.named("engine:1"))
    await one.install(one.request("engine:1"))
    written = json.loads((one.tree / "metadata.json").read_text())
    assert (written["digest"], written["index_digest"]) == (image.digest, index.digest)
    assert OCI_INDEX.encode() in (image.directory / "index.json").read_bytes()
