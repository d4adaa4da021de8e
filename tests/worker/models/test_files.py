"""Placing the files of models: verified, once, and noticed when they change."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from tests.worker.world import World, silent, tiny_chat

from enginehouse.core.errors import EnginehouseError, Hopeless, Unavailable
from enginehouse.core.gallery import find_model
from enginehouse.core.model import HeldModel, Model, ModelFile, holds
from enginehouse.fetch.galleries.sources import load_builtin
from enginehouse.host.disk import sha256_of
from enginehouse.worker.models.files import MANIFEST


@pytest.fixture
def empty(tmp_path: Path) -> World:
    return World(tmp_path)


def with_file(**fields: object) -> Model:
    model = tiny_chat()
    return msgspec.structs.replace(model, files=(msgspec.structs.replace(model.files[0], **fields),))


async def test_a_pulled_model_is_held_and_not_fetched_twice(empty: World) -> None:
    await empty.models.pull(tiny_chat(), 3, silent)
    (held,) = empty.models.held_models()
    assert (held.name, held.generation) == ("tiny-chat", 3)
    assert holds(empty.models.held_models(), tiny_chat())
    inode = empty.models.check_files(tiny_chat()).stat().st_ino
    await empty.models.pull(tiny_chat(), 4, silent)
    assert empty.models.check_files(tiny_chat()).stat().st_ino == inode
    assert empty.models.held_models()[0].generation == 4


async def test_a_file_that_was_cut_is_no_longer_held_and_is_placed_again(empty: World) -> None:
    await empty.models.pull(tiny_chat(), 1, silent)
    os.truncate(empty.models.check_files(tiny_chat()), 100)
    # Nothing of it is any use, but something of it is there: a removal has something to do.
    assert empty.models.held_models() == (HeldModel("tiny-chat", (), 1),)
    assert not holds(empty.models.held_models(), tiny_chat())
    await empty.models.pull(tiny_chat(), 2, silent)
    assert holds(empty.models.held_models(), tiny_chat())


async def test_what_cannot_be_read_now_is_not_called_absent(empty: World) -> None:
    await empty.models.pull(tiny_chat(), 1, silent)
    manifest = empty.models.path_of(tiny_chat()) / MANIFEST
    manifest.unlink()
    manifest.mkdir()  # any error but its absence
    assert empty.models.held_models() == (HeldModel("tiny-chat", ()),)
    with pytest.raises(Unavailable, match="cannot place the files of tiny-chat"):
        await empty.models.pull(tiny_chat(), 2, silent)
    assert await empty.models.remove("tiny-chat")
    assert empty.models.held_models() == ()


async def test_a_source_that_is_not_what_was_promised_is_refused_with_sizes_and_leaves_nothing(empty: World) -> None:
    with pytest.raises(Hopeless, match=r"tiny-chat-2m-q8_0.gguf: 2159040 bytes .* expected 3000000 bytes") as caught:
        await empty.models.pull(with_file(sha256="0" * 64, size_bytes=3000000), 1, silent)
    assert caught.value.code == "digest_mismatch"
    assert list((empty.place.models / "tiny-chat").iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"name": "../outside"}, "invalid_name"),
        ({"name": "model.json"}, "invalid_name"),
        ({"uri": "ftp://elsewhere/model.gguf"}, "unsupported"),
        ({"uri": "builtin:../backends.yaml"}, "invalid_name"),
        ({"uri": "builtin:absent.gguf"}, "not_found"),
        ({"uri": "pypi:a==1#file", "requirement": "b==1 --hash=sha256:" + "0" * 64}, "invalid_uri"),
        ({"uri": "pypi:a==1#../f", "requirement": "a==1 --hash=sha256:" + "0" * 64}, "invalid_uri"),
    ],
)
async def test_a_file_from_a_wrong_place_is_refused(empty: World, fields: dict[str, object], code: str) -> None:
    with pytest.raises(EnginehouseError) as caught:
        await empty.models.pull(with_file(**fields), 1, silent)
    assert caught.value.code == code


async def test_a_file_inside_a_package_is_taken_out_of_it(empty: World, installed_tree: Path) -> None:
    (installed,) = installed_tree.glob("venv/lib/python*/site-packages/pykdtree/__init__.py")
    requirement = load_builtin().backends[1].requirements[1]
    inside = ModelFile(
        "readme.py",
        "pypi:pykdtree==1.4.3#pykdtree/__init__.py",
        sha256_of(installed),
        0,
        requirement,
    )
    model = Model(name="org/model:tag", backend="llama-cpp", files=(inside,))
    await empty.models.pull(model, 1, silent)
    assert holds(empty.models.held_models(), model)
    assert sorted(path.name for path in empty.models.path_of(model).iterdir()) == ["model.json", "readme.py"]


async def test_the_better_model_of_the_gallery_is_what_it_says(empty: World) -> None:
    model = find_model((load_builtin(),), "smollm2")
    assert model is not None
    done: list[int] = []
    await empty.models.pull(model, 1, lambda phase, file, count, total: done.append(count))
    assert holds(empty.models.held_models(), model)
    assert done == sorted(done)


async def test_what_a_killed_worker_was_fetching_is_removed(empty: World) -> None:
    await empty.models.pull(tiny_chat(), 1, silent)
    directory = empty.models.path_of(tiny_chat())
    (directory / "half.gguf.part").write_bytes(b"half")
    (directory / ".package-x").mkdir()
    empty.models.recover()
    assert sorted(path.name for path in directory.iterdir()) == ["model.json", "tiny-chat-2m-q8_0.gguf"]
