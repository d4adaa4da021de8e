"""Images on disk: layouts and tars made by the real tools, used where they are."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.fetch.images import OCI_MANIFEST, compress, digest_of, run, tar_of, umoci_image, write_image, write_index
from tests.fetch.pulling import read_all

from enginehouse.core.artifact import Artifact, Layer
from enginehouse.core.errors import EnginehouseError, Hopeless, NotFound
from enginehouse.fetch.archives.layout import LayoutOrigin

LINUX = "linux/amd64"
FILES = [{"run.sh": b"#!/bin/sh\n"}, {"lib/a.so": bytes(range(256)) * 5000}]


async def resolve(path: Path, platform: str = LINUX) -> tuple[LayoutOrigin, Artifact]:
    origin = LayoutOrigin(f"ocifile://{path}", path)
    return origin, await origin.resolve(platform)


async def refusal(path: Path, platform: str = LINUX) -> EnginehouseError:
    with pytest.raises(EnginehouseError) as caught:
        await resolve(path, platform)
    return caught.value


def on_disk(origin: LayoutOrigin, layer: Layer) -> bytes:
    blob = origin.local(layer)
    assert blob is not None
    return blob.path.read_bytes()[blob.offset_bytes :][: layer.size_bytes]


async def check_layers(origin: LayoutOrigin, artifact: Artifact, diff_ids: list[str]) -> None:
    assert [layer.diff_id for layer in artifact.layers] == diff_ids
    for layer in artifact.layers:
        assert digest_of(on_disk(origin, layer)) == layer.digest
        assert digest_of(await read_all(origin, layer)) == layer.digest
        assert await read_all(origin, layer, 3, 20) == on_disk(origin, layer)[3:20]


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
async def test_a_layout_directory_is_used_where_it_is(tmp_path: Path, compression: str) -> None:
    image = write_image(tmp_path / "layout", FILES, compression=compression)  # type: ignore[arg-type]
    origin, artifact = await resolve(image.directory)
    assert (artifact.digest, artifact.index_digest) == (image.digest, "")
    assert {layer.compression for layer in artifact.layers} == {compression}
    await check_layers(origin, artifact, [blob.diff_id for blob in image.layers])


async def test_an_image_of_umoci_is_understood(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "run.sh").write_text("#!/bin/sh\n")
    await umoci_image(tmp_path / "layout", tree)
    _, artifact = await resolve(tmp_path / "layout")
    assert len(artifact.layers) == 1
    assert artifact.layers[0].compression == "gzip"


@pytest.mark.parametrize("kind", ["oci-archive", "docker-archive"])
async def test_a_tar_of_skopeo_is_used_without_unpacking_it(tmp_path: Path, kind: str) -> None:
    image = write_image(tmp_path / "layout", FILES)
    tar = tmp_path / "image.tar"
    await run("skopeo", "--insecure-policy", "copy", "--quiet", f"oci:{image.directory}", f"{kind}:{tar}")
    before = sorted(path.name for path in tmp_path.iterdir())
    origin, artifact = await resolve(tar)
    await check_layers(origin, artifact, [blob.diff_id for blob in image.layers])
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    if kind == "oci-archive":
        assert artifact.digest == image.digest
    else:
        assert [layer.digest for layer in artifact.layers] == [layer.diff_id for layer in artifact.layers]
        assert (await resolve(tar))[1] == artifact
    assert (await refusal(tar, "linux/arm64")).code == "unsupported_platform"


def docker_tar(path: Path, members: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def saved(layers: list[str], diff_ids: list[str], **changes: str) -> dict[str, bytes]:
    config = {"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": diff_ids}} | changes
    manifest = [{"Config": "config.json", "RepoTags": ["a:b"], "Layers": layers}]
    return {"config.json": json.dumps(config).encode(), "manifest.json": json.dumps(manifest).encode()}


async def test_a_saved_image_with_linked_and_compressed_layers(tmp_path: Path) -> None:
    plain, other = tar_of(FILES[0]), tar_of(FILES[1])
    squeezed = compress(other, "gzip")
    members = saved(
        ["a/layer.tar", "b/layer.tar", "c/layer.tar"], [digest_of(plain), digest_of(other), digest_of(plain)]
    )
    members |= {"./a/layer.tar": plain, "b/layer.tar": squeezed}
    tar = docker_tar(tmp_path / "x.tar", members, {"c/layer.tar": "../a/layer.tar"})
    origin, artifact = await resolve(tar)
    assert [layer.compression for layer in artifact.layers] == ["none", "gzip", "none"]
    assert artifact.layers[1].digest == digest_of(squeezed)
    assert artifact.digest == digest_of(members["config.json"])
    await check_layers(origin, artifact, [digest_of(plain), digest_of(other), digest_of(plain)])


@pytest.mark.parametrize(
    ("members", "code"),
    [
        ({"hello.txt": b"x"}, "unsupported"),
        ({"manifest.json": b"<"}, "unsafe_archive"),
        ({"manifest.json": b"[]"}, "unsupported_platform"),
        (saved(["../../etc/passwd"], ["sha256:" + "0" * 64]), "not_found"),
        (saved(["a"], []) | {"a": b""}, "unsafe_archive"),
        (saved(["a"], ["x"]) | {"a": b""}, "unsafe_archive"),
        (saved(["a"] * 128, ["sha256:" + "0" * 64] * 128) | {"a": b""}, "unsafe_archive"),
        (saved([], [], architecture="arm64"), "unsupported_platform"),
        ({"index.json": b"{}"}, "unsafe_archive"),
        ({"index.json": b" " * 5_000_000}, "archive_too_large"),
    ],
)
async def test_a_tar_that_is_no_image_is_refused(tmp_path: Path, members: dict[str, bytes], code: str) -> None:
    error = await refusal(docker_tar(tmp_path / "x.tar", members))
    assert (type(error), error.code) == (Hopeless, code)


async def test_a_configuration_under_a_name_that_is_not_its_digest_is_refused(tmp_path: Path) -> None:
    members = saved([], [])
    wrong = "0" * 64 + ".json"
    members[wrong] = members.pop("config.json")
    members["manifest.json"] = members["manifest.json"].replace(b"config.json", wrong.encode())
    assert (await refusal(docker_tar(tmp_path / "x.tar", members))).code == "digest_mismatch"


async def test_what_is_no_tar_or_not_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(compress(tar_of(FILES[0]), "gzip"))
    assert (await refusal(tmp_path / "x.tar")).code == "unsupported"
    assert isinstance(await refusal(tmp_path / "missing.tar"), NotFound)
    assert (await refusal(tmp_path)).code == "unsupported"


async def test_an_index_in_a_layout_gives_the_platforms_image(tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    amd = write_image(layout, [{"a": b"amd"}])
    arm = write_image(layout, [{"a": b"arm"}], platform="linux/arm64")
    index = write_index(layout, [amd, arm])
    for image in (amd, arm):
        _, artifact = await resolve(layout, image.platform)
        assert (artifact.digest, artifact.index_digest) == (image.digest, index.digest)
    error = await refusal(layout, "darwin/arm64")
    assert error.code == "unsupported_platform"
    assert "linux/arm64" in error.message


async def test_several_images_are_told_apart_by_platform_or_not_at_all(tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    images = [
        write_image(layout, [{"a": b"1"}]),
        write_image(layout, [{"a": b"2"}], platform="linux/arm64"),
        write_image(layout, [{"a": b"3"}], platform="linux/arm64"),
    ]
    entries = [{"mediaType": OCI_MANIFEST, "digest": image.digest, "size": 1} for image in images]
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [*entries, entries[0]]}))
    assert (await resolve(layout))[1].digest == images[0].digest
    error = await refusal(layout, "linux/arm64")
    assert error.code == "unsupported"
    assert "2 images" in error.message


async def test_damage_in_a_layout_is_found(tmp_path: Path) -> None:
    image = write_image(tmp_path / "layout", FILES)
    blobs = image.directory / "blobs" / "sha256"
    layer = blobs / image.layers[0].digest.removeprefix("sha256:")
    manifest = blobs / image.digest.removeprefix("sha256:")
    layer.write_bytes(layer.read_bytes() + b"x")
    assert (await refusal(image.directory)).code == "digest_mismatch"
    layer.unlink()
    assert (await refusal(image.directory)).code == "not_found"
    manifest.write_bytes(manifest.read_bytes().replace(b"2", b"3", 1))
    assert (await refusal(image.directory)).code == "digest_mismatch"
