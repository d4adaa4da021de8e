"""Galleries from outside: fetched when due, kept when good, marked stale when their source fails."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.core.localai import INDEX, needs_index
from tests.fetch.galleries.gallery_server import ONE, GalleryServer, World, names, serving

from enginehouse.core.errors import Hopeless, NotFound, Unavailable
from enginehouse.core.gallery import resolve
from enginehouse.core.gallery_source import GallerySource, decode_sources, encode_sources
from enginehouse.fetch.galleries.sources import Sources, load_named
from enginehouse.fetch.http.addresses import Rules
from enginehouse.fetch.http.client import Client

TWO = b"- {name: one, uri: quay.io/a/b:2}\n- {name: two, uri: quay.io/a/b:2}\n- {name: ../bad}\n"
HOUR = 3600.0


@pytest.fixture
def server() -> Iterator[GalleryServer]:
    with serving() as made:
        yield made


@pytest.fixture
async def world(server: GalleryServer, tmp_path: Path) -> AsyncIterator[World]:
    made = World(server, tmp_path / "galleries")
    yield made
    await made.client.close()


async def test_nothing_is_known_before_the_first_fetch_and_a_lookup_says_so(world: World) -> None:
    sources = world.sources()
    await sources.restore()
    assert [state.status for state in sources.states] == ["never loaded"]
    with pytest.raises(Unavailable, match="the gallery ours is being fetched for the first time"):
        resolve(sources.galleries, "one", "default", "linux/amd64")
    assert world.server.asked == []


async def test_after_the_first_answer_of_its_source_a_name_is_there_or_not_found_whatever_the_answer_was(
    world: World,
) -> None:
    known = await world.loaded()
    with pytest.raises(NotFound):
        resolve(known.galleries, "nothing", "default", "linux/amd64")
    again = world.sources()
    await again.restore()
    with pytest.raises(NotFound):
        resolve(again.galleries, "nothing", "default", "linux/amd64")


async def test_a_gallery_is_fetched_kept_and_asked_for_conditionally_after_an_hour(world: World) -> None:
    sources = await world.loaded()
    world.now += HOUR - 1
    await sources.refresh()
    assert world.server.take() == []
    world.now += 1
    await sources.refresh()
    ((path, known, status),) = world.server.take()
    assert (path, status) == ("/index.yaml", 304)
    assert known
    (state,) = sources.states
    assert (state.status, state.age_seconds, state.entries, state.error) == ("fresh", 0.0, 1, "")
    world.server.documents["/index.yaml"] = TWO
    world.now += HOUR
    await sources.refresh()
    assert names(sources) == ["one", "two"]
    assert [one.entry for one in sources.states[0].skipped] == ["../bad"]


async def test_a_restart_takes_the_copy_without_asking_and_asks_when_it_is_due(world: World) -> None:
    await world.loaded()
    again = world.sources()
    await again.restore()
    await again.refresh()
    assert names(again) == ["one"]
    assert again.states[0].status == "fresh"
    assert world.server.take() == []
    world.now += HOUR
    await again.refresh()
    assert [status for _, _, status in world.server.take()] == [304]
    assert sorted(path.suffix for path in world.directory.iterdir()) == [".json", ".yaml"]
    assert {path.stem for path in world.directory.iterdir()} == {hashlib.sha256(world.source.url.encode()).hexdigest()}


@pytest.mark.parametrize("answer", [500, 404, b"- {", b"[]", b"- ../bad", b"- name: a\n  name: b", b"<html>"])
async def test_a_source_that_fails_leaves_the_last_good_copy_and_marks_it_stale(
    world: World, answer: bytes | int
) -> None:
    """F-106."""
    sources = await world.loaded()
    world.server.documents = {"/index.yaml": answer, "/mirror.yaml": answer}
    world.now += HOUR
    await sources.refresh()
    (state,) = sources.states
    assert (state.status, state.entries, state.age_seconds) == ("stale", 1, HOUR)
    assert state.error.startswith("cannot ")
    assert names(sources) == ["one"]
    restarted = world.sources()
    await restarted.restore()
    assert names(restarted) == ["one"]


async def test_failures_back_off_and_the_first_success_ends_it(world: World) -> None:
    sources = world.sources()
    pauses: list[float] = []
    last = world.now
    while len(pauses) < 9:
        await sources.refresh()
        if world.server.take():
            pauses.append(world.now - last)
            last = world.now
        world.now += 15
    assert pauses[:5] == [0, 30, 60, 120, 240]
    assert pauses[-1] == HOUR
    world.server.documents["/index.yaml"] = ONE
    world.now += HOUR
    await sources.refresh()
    assert sources.states[0].status == "fresh"


async def test_a_mirror_steps_in_and_the_place_that_failed_is_left_alone_for_ten_minutes(world: World) -> None:
    world.server.documents = {"/index.yaml": 503, "/mirror.yaml": ONE}
    source = GallerySource(
        name="ours", url=world.server.url("/index.yaml"), mirrors=(world.server.url("/mirror.yaml"),)
    )
    sources = world.sources(source)
    await sources.refresh()
    assert (names(sources), sources.states[0].status) == (["one"], "fresh")
    assert [path for path, _, _ in world.server.take()] == ["/index.yaml", "/mirror.yaml"]
    world.server.documents["/mirror.yaml"] = 503
    world.now += HOUR
    await sources.refresh()  # the ten minutes are over: both are asked, both fail
    assert [path for path, _, _ in world.server.take()] == ["/index.yaml", "/mirror.yaml"]
    world.server.documents["/mirror.yaml"] = TWO
    world.now += 30
    await sources.refresh()  # all are in that state, so all are tried
    assert [path for path, _, _ in world.server.take()] == ["/index.yaml", "/mirror.yaml"]
    assert names(sources) == ["one", "two"]


async def test_within_ten_minutes_only_the_mirror_is_asked(world: World, tmp_path: Path) -> None:
    # A file as primary place is looked at every ten seconds, so the mirror is asked for within the ten minutes.
    source = GallerySource(
        name="ours", url=f"file://{tmp_path}/absent.yaml", mirrors=(world.server.url("/mirror.yaml"),)
    )
    world.server.documents["/mirror.yaml"] = ONE
    sources = world.sources(source)
    await sources.refresh()
    (tmp_path / "absent.yaml").write_bytes(TWO)
    world.now += 590
    await sources.refresh()
    assert names(sources) == ["one"]
    world.now += 11
    await sources.refresh()
    assert names(sources) == ["one", "two"]


async def test_one_broken_gallery_leaves_the_others_alone(world: World) -> None:
    """F-106."""
    world.server.documents["/good"] = ONE
    bad = GallerySource(name="bad", url=world.server.url("/bad"))
    sources = world.sources(bad, GallerySource(name="good", url=world.server.url("/good")))
    await sources.refresh()
    assert [state.status for state in sources.states] == ["never loaded", "fresh"]
    assert resolve(sources.galleries, "one", "default", "linux/amd64").source == "good"
    with pytest.raises(NotFound, match="the gallery bad is not loaded: cannot find"):
        resolve(sources.galleries, "two", "default", "linux/amd64")


async def test_a_host_that_is_not_listed_is_never_asked(world: World) -> None:
    strict = Client(Rules())
    sources = Sources((world.source,), strict, world.directory, now=lambda: world.now)
    await sources.refresh()
    await strict.close()
    assert world.server.asked == []
    assert "cannot" in sources.states[0].error


async def test_a_document_that_is_too_large_is_refused_before_it_is_read(world: World) -> None:
    world.server.documents["/index.yaml"] = b"#" * (5 * 1024 * 1024 + 1)
    sources = world.sources()
    await sources.refresh()
    assert "larger than 5242880 bytes" in sources.states[0].error


async def test_a_reference_leads_to_the_document_beside_it(world: World) -> None:
    world.server.documents = {"/a/latest.ref": b" v7/index.yaml\n", "/a/v7/index.yaml": ONE}
    sources = world.sources(GallerySource(name="ours", url=world.server.url("/a/latest.ref")))
    await sources.refresh()
    assert names(sources) == ["one"]


@pytest.mark.parametrize(
    "content", [b"", b"../x", b"http://elsewhere/x", b"/etc/passwd", b"a b", b"x?y", b"\xff", b"x" * 2000]
)
async def test_a_reference_leads_nowhere_else(world: World, content: bytes) -> None:
    world.server.documents = {"/a/latest.ref": content}
    sources = world.sources(GallerySource(name="ours", url=world.server.url("/a/latest.ref")))
    await sources.refresh()
    assert [path for path, _, _ in world.server.take()] == ["/a/latest.ref"]
    assert "cannot follow" in sources.states[0].error


async def test_a_file_is_read_through_links_and_noticed_when_it_changes(world: World, tmp_path: Path) -> None:
    real = tmp_path / "real index.yaml"
    real.write_bytes(ONE)
    link = tmp_path / "link.yaml"
    link.symlink_to(real)
    for url in (f"file://{link}", f"file://{tmp_path}/real%20index.yaml"):
        sources = world.sources(GallerySource(name="ours", url=url))
        await sources.refresh()
        assert names(sources) == ["one"]
    real.write_bytes(TWO)
    world.now += 10
    await sources.refresh()
    assert names(sources) == ["one", "two"]
    real.unlink()
    world.now += 10
    await sources.refresh()
    assert (names(sources), sources.states[0].status) == (["one", "two"], "stale")


async def test_what_is_no_plain_file_is_refused_at_once(world: World, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for url, told in ((f"file://{tmp_path}/pipe", "not a regular file"), (f"file://{tmp_path}", "cannot read")):
        sources = world.sources(GallerySource(name="ours", url=url))
        await sources.refresh()
        assert told in sources.states[0].error


async def test_a_copy_that_was_damaged_is_fetched_again(world: World) -> None:
    await world.loaded()
    for path in world.directory.glob("*.yaml"):
        path.write_bytes(b"- {")
    sources = world.sources()
    await sources.restore()
    assert names(sources) == []
    await sources.refresh()
    assert names(sources) == ["one"]


async def test_a_copy_whose_description_is_of_another_is_used_and_asked_for_again(world: World) -> None:
    await world.loaded()
    for path in world.directory.glob("*.yaml"):
        path.write_bytes(TWO)
    sources = world.sources()
    await sources.restore()
    assert names(sources) == ["one", "two"]
    await sources.refresh()
    assert [(known, status) for _, known, status in world.server.take()] == [("", 200)]
    assert names(sources) == ["one"]


async def test_a_directory_that_cannot_be_written_costs_only_the_copy(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    world.directory = tmp_path / "file" / "galleries"
    assert names(await world.loaded()) == ["one"]


async def test_a_clock_that_was_set_back_does_not_silence_a_gallery(world: World) -> None:
    sources = await world.loaded()
    world.now -= 10 * HOUR
    await sources.refresh()
    assert len(world.server.take()) == 1


async def test_a_gallery_with_a_signature_policy_lists_its_images_and_installs_none(world: World) -> None:
    world.server.documents["/index.yaml"] = ONE
    sources = world.sources(
        *decode_sources([{"name": "ours", "url": world.source.url, "verification": {"issuer": "https://i"}}])
    )
    await sources.refresh()
    assert names(sources) == ["one"]
    with pytest.raises(Hopeless, match="requires signatures"):
        resolve(sources.galleries, "one", "default", "linux/amd64")


# For a worker that is sent only names -------------------------------------------------------------


async def test_the_galleries_that_a_message_names_are_loaded_through_the_copies(world: World) -> None:
    world.server.documents["/index.yaml"] = ONE
    text = encode_sources((world.source,))
    for _ in range(2):
        galleries = await load_named(text, world.client, world.directory)
        assert [gallery.name for gallery in galleries] == ["enginehouse", "ours"]
        assert resolve(galleries, "ours@one", "default", "linux/amd64").uri == "quay.io/a/b:1"
    assert len(world.server.take()) == 1
    assert [gallery.name for gallery in await load_named("", world.client, world.directory)] == ["enginehouse"]


async def test_another_machine_cannot_have_files_of_this_one_read(world: World, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(ONE)
    text = encode_sources((GallerySource(name="ours", url=f"file://{tmp_path}/x.yaml"),))
    galleries = await load_named(text, world.client, world.directory)
    with pytest.raises(NotFound, match="may not name local files"):
        resolve(galleries, "one", "default", "linux/amd64")


@needs_index
async def test_the_real_index_comes_over_http_with_all_its_entries(world: World) -> None:
    world.server.documents["/index.yaml"] = INDEX.read_bytes()
    sources = world.sources()
    await sources.refresh()
    (state,) = sources.states
    assert (state.status, state.entries, state.skipped) == ("fresh", 1033, ())
