"""Files of models from anywhere: whole, verified, continued after a kill, shared, pinned."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.fetch.faults import Answer, Cut, Flip, Header, IgnoreRange, Stall
from tests.fetch.faulty import Faulty, faulty
from tests.worker.world import World, silent, until

from enginehouse.artifact.blobs.partial import journalled_bytes
from enginehouse.core.errors import Denied, EnginehouseError, Hopeless, Invalid, Unavailable
from enginehouse.core.model import Model, ModelFile, PinnedFile, holds
from enginehouse.fetch.http.retries import RetryPolicy
from enginehouse.fetch.models.credentials import ModelCredentials
from enginehouse.host import confinement, disk
from enginehouse.link.client import FrontendClient
from enginehouse.link.uploads import FrontendUploads
from enginehouse.worker.models.files import DOWNLOADS

CONTENT = os.urandom(1024) * (20 * 1024)  # 20 MiB: several parts
STALL_SECONDS = 1.0
SPARSE_BYTES = 4 * 1024**3 if os.environ.get("ENGINEHOUSE_PROOF") else 256 * 1024**2
DIGEST = hashlib.sha256(CONTENT).hexdigest()
_PULL = """
import asyncio, sys
from pathlib import Path
import msgspec
from tests.worker.world import World, silent
from enginehouse.core.model import Model
world = World(Path(sys.argv[1]), allowed_hosts=("127.0.0.1",))
asyncio.run(world.models.pull(msgspec.json.decode(sys.argv[2], type=Model), 1, silent))
"""


@pytest.fixture
async def web() -> AsyncIterator[Faulty]:
    async with faulty() as server:
        server.files["/model.gguf"] = CONTENT
        yield server


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = opened(tmp_path / "data")
    yield made
    await made.made.close()


def opened(directory: Path) -> World:
    made = World(directory, allowed_hosts=("127.0.0.1",))
    fetcher = made.models._fetcher
    fetcher._sources = msgspec.structs.replace(fetcher._sources, patience=RetryPolicy(tries=2, factor=0.01))
    return made


def model(uri: str, sha256: str = DIGEST, name: str = "m", **more: object) -> Model:
    file = ModelFile("model.gguf", uri, sha256, len(CONTENT))
    return Model(name=name, backend="llama-cpp", files=(msgspec.structs.replace(file, **more),))


async def test_a_file_from_a_web_server_arrives_whole_with_progress_by_bytes(world: World, web: Faulty) -> None:
    seen: list[tuple[str, int, int]] = []
    wanted = model(f"{web.url}/model.gguf")
    pins = await world.models.pull(wanted, 1, lambda phase, _, done, total: seen.append((phase, done, total)))
    await asyncio.sleep(0)
    assert (pins, holds(world.models.held_models(), wanted)) == ((), True)
    assert world.models.check_files(wanted).read_bytes() == CONTENT
    done = [count for phase, count, _ in seen if phase == "downloading"]
    assert done == sorted(done)
    assert len({*done}) > 3
    assert {total for _, _, total in seen} == {len(CONTENT)}
    await world.models.pull(wanted, 2, silent)
    assert web.bytes_sent("/model.gguf") == len(CONTENT), "fetched once"
    assert list((world.place.models / DOWNLOADS).iterdir()) == []


async def test_a_download_goes_on_where_a_killed_worker_was(tmp_path: Path, web: Faulty) -> None:
    web.plan(Stall(after_bytes=6 * 1024 * 1024), path="model.gguf", method="GET", times=None)
    wanted = model(f"{web.url}/model.gguf")
    command = [sys.executable, "-c", _PULL, str(tmp_path / "data"), msgspec.json.encode(wanted).decode()]
    process = await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).parents[3])
    part = tmp_path / "data" / "models" / DOWNLOADS / f"{DIGEST}.part"
    try:
        await until(lambda: journalled_bytes(part, len(CONTENT)) > 4 * 1024 * 1024)
    finally:
        process.send_signal(signal.SIGKILL)
    async with asyncio.timeout(10):
        assert await process.wait() == -signal.SIGKILL
    held = journalled_bytes(part, len(CONTENT))
    web.forget_plans()
    before = web.bytes_sent("/model.gguf")
    world = opened(tmp_path / "data")
    world.models.recover()
    await world.models.pull(wanted, 1, silent)
    await world.made.close()
    assert web.bytes_sent("/model.gguf") - before == len(CONTENT) - held
    assert disk.sha256_of(world.models.check_files(wanted)) == DIGEST


async def test_a_fetch_that_is_slow_goes_on_and_one_that_does_not_move_is_cut(world: World, web: Faulty) -> None:
    """F-072."""
    content = CONTENT[: 2 * 1024 * 1024]
    web.files["/slow.gguf"] = content
    digest = hashlib.sha256(content).hexdigest()
    wanted = model(f"{web.url}/slow.gguf", sha256=digest, size_bytes=len(content))
    world.models._fetcher._sources.client._stall_seconds = STALL_SECONDS
    web.bytes_per_second = 400_000
    began = time.monotonic()
    await world.models.pull(wanted, 1, silent)
    assert time.monotonic() - began > 2 * STALL_SECONDS, "so slow that a clock alone would have cut it"
    web.bytes_per_second = None
    web.plan(Stall(after_bytes=1_000_000), path="model.gguf", method="GET", times=None)
    heard = began = time.monotonic()

    def hear(phase: str, file: str, done: int, total: int) -> None:
        nonlocal heard
        heard = time.monotonic()

    with pytest.raises(Unavailable) as caught:
        await world.models.pull(model(f"{web.url}/model.gguf", name="dead"), 1, hear)
    assert caught.value.code == "stalled"
    assert time.monotonic() - began >= STALL_SECONDS
    assert time.monotonic() - heard <= 1.2 * STALL_SECONDS + 0.5, "half a second for a busy machine"


async def test_a_long_verification_without_a_byte_is_no_stall(world: World, tmp_path: Path) -> None:
    """F-072."""
    shared = tmp_path / "shared"
    shared.mkdir()
    sparse = shared / "model.gguf"
    with sparse.open("wb") as file:
        file.truncate(SPARSE_BYTES)
    began = time.monotonic()
    digest = disk.sha256_of(sparse)
    world.models._fetcher._sources.client._stall_seconds = (time.monotonic() - began) / 10
    fetcher = world.models._fetcher
    fetcher._sources = msgspec.structs.replace(fetcher._sources, directories=(shared,))
    wanted = model(f"file://{sparse}", sha256=digest, size_bytes=SPARSE_BYTES)
    await world.models.pull(wanted, 1, silent)
    assert holds(world.models.held_models(), wanted)


@pytest.mark.parametrize("fault", [Cut(after_bytes=5_000_000), IgnoreRange()])
async def test_a_server_with_misfortunes_still_gives_the_file(
    world: World, web: Faulty, fault: Cut | IgnoreRange
) -> None:
    web.plan(fault, path="model.gguf", method="GET", times=None if isinstance(fault, IgnoreRange) else 2)
    wanted = model(f"{web.url}/model.gguf")
    await world.models.pull(wanted, 1, silent)
    assert disk.sha256_of(world.models.check_files(wanted)) == DIGEST


async def test_wrong_bytes_are_refused_with_what_to_do_and_nothing_of_them_is_kept(world: World, web: Faulty) -> None:
    web.plan(Flip(at_byte=17), path="model.gguf", method="GET", times=None)
    with pytest.raises(Hopeless, match="was changed there") as caught:
        await world.models.pull(model(f"{web.url}/model.gguf"), 1, silent)
    assert caught.value.code == "digest_mismatch"
    with pytest.raises(Hopeless, match="20971520 bytes instead of 5"):
        await world.models.pull(model(f"{web.url}/model.gguf", size_bytes=5), 1, silent)
    assert list((world.place.models / DOWNLOADS).iterdir()) == []
    assert list((world.place.models / "m").iterdir()) == []


async def test_a_digest_that_the_source_does_not_tell_is_found_and_told(world: World, web: Faulty) -> None:
    wanted = model(f"{web.url}/model.gguf", sha256="", size_bytes=0)
    pins = await world.models.pull(wanted, 1, silent)
    assert pins == (PinnedFile("model.gguf", DIGEST, len(CONTENT)),)
    assert await world.models.pull(wanted, 2, silent) == pins, "told again, without another fetch"
    assert web.bytes_sent("/model.gguf") == len(CONTENT)
    assert holds(world.models.held_models(), model(f"{web.url}/model.gguf"))


@pytest.mark.parametrize("has_tag", [True, False])
async def test_a_file_without_a_digest_is_never_mixed_from_two_versions(
    world: World, web: Faulty, has_tag: bool
) -> None:
    if not has_tag:
        web.plan(Header("etag"), path="model.gguf", times=None)
    web.plan(Answer(503), path="model.gguf", method="GET", times=None, after=1)
    wanted = model(f"{web.url}/model.gguf", sha256="", size_bytes=0)
    with pytest.raises(Unavailable):
        async with asyncio.timeout(20):
            await world.models.pull(wanted, 1, silent)
    newer = CONTENT[::-1]
    web.forget_plans()
    web.files["/model.gguf"] = newer
    (pin,) = await world.models.pull(wanted, 1, silent)
    assert pin.sha256 == hashlib.sha256(newer).hexdigest()


async def test_models_with_the_same_file_share_it_and_part_without_harm(world: World, web: Faulty) -> None:
    first, second = (model(f"{web.url}/model.gguf", name=name) for name in ("first", "second"))
    await world.models.pull(first, 1, silent)
    free = disk.free_bytes(world.place.models)
    await world.models.pull(second, 1, silent)
    assert web.bytes_sent("/model.gguf") == len(CONTENT)
    if confinement.choose("auto", "").protects_trees:
        assert free - disk.free_bytes(world.place.models) < len(CONTENT) // 2
    assert await world.models.remove("first")
    assert holds(world.models.held_models(), second)
    assert disk.sha256_of(world.models.check_files(second)) == DIGEST


async def test_a_repository_of_many_files_keeps_its_directories(world: World, web: Faulty) -> None:
    names = ["config.json", "text_encoder/model.safetensors", "text_encoder/config.json"]
    files = []
    for name in names:
        content = name.encode() * 100
        web.files[f"/r/{name}"] = content
        digest = hashlib.sha256(content).hexdigest()
        files.append(ModelFile(name, f"{web.url}/r/{name}", digest, len(content)))
    whole = Model(name="org/repository", backend="diffusers", files=tuple(files))
    await world.models.pull(whole, 1, silent)
    directory = world.models.path_of(whole)
    found = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    assert found == sorted([*names, "model.json"])
    fewer = msgspec.structs.replace(whole, files=tuple(files[:2]))
    await world.models.pull(fewer, 2, silent)
    assert not (directory / names[2]).exists()
    assert holds(world.models.held_models(), fewer)


async def test_a_file_in_a_registry_is_fetched_by_its_digest(world: World, web: Faulty) -> None:
    web.files[f"/v2/library/tiny/blobs/sha256:{DIGEST}"] = CONTENT
    for number, (scheme, size) in enumerate((("oci", len(CONTENT)), ("ollama", 0))):
        wanted = model(f"{scheme}://{web.address}/library/tiny@sha256:{DIGEST}", name=f"m{number}", size_bytes=size)
        await world.models.pull(wanted, 1, silent)
        assert disk.sha256_of(world.models.check_files(wanted)) == DIGEST
        await world.models.remove(f"m{number}")


async def test_an_upload_is_read_from_the_frontend_that_has_it_with_the_node_s_token(world: World, web: Faulty) -> None:
    web.files[f"/api/uploads/{DIGEST}"] = CONTENT
    async with faulty() as other:  # has no uploads
        clients = [FrontendClient(url, "join", user_agent="test") for url in (other.url, web.url)]
        fetcher = world.models._fetcher
        uploads = FrontendUploads(clients, lambda: "token-of-the-node")
        fetcher._sources = msgspec.structs.replace(fetcher._sources, uploads=uploads)
        wanted = model(f"upload:{DIGEST}")
        web.plan(Cut(after_bytes=9_000_000), path="uploads", times=1)
        await world.models.pull(wanted, 1, silent)
        assert disk.sha256_of(world.models.check_files(wanted)) == DIGEST
        assert {one.headers["authorization"] for one in web.requests} == {"Bearer token-of-the-node"}
        absent = model("upload:" + "0" * 64, sha256="0" * 64)
        with pytest.raises(EnginehouseError, match="cannot") as caught:
            await world.models.pull(absent, 1, silent)
        assert caught.value.code != "digest_mismatch"
        for client in clients:
            client.close()


async def test_shared_storage_is_read_in_place_and_only_where_it_is_allowed(world: World, tmp_path: Path) -> None:
    storage = tmp_path / "nas" / "models"
    storage.mkdir(parents=True)
    (storage / "big.gguf").write_bytes(CONTENT)
    (tmp_path / "secret").write_bytes(CONTENT)
    (storage / "out.gguf").symlink_to(tmp_path / "secret")
    wanted = model(f"file://{storage}/big.gguf")
    with pytest.raises(Invalid, match="--model-directories"):
        await world.models.pull(wanted, 1, silent)
    fetcher = world.models._fetcher
    fetcher._sources = msgspec.structs.replace(fetcher._sources, directories=(tmp_path / "nas",))
    with pytest.raises(Invalid, match="--model-directories"):
        await world.models.pull(model(f"file://{storage}/out.gguf"), 1, silent)
    with pytest.raises(Hopeless, match="mount the storage"):
        await world.models.pull(model(f"file://{storage}/absent.gguf"), 1, silent)
    await world.models.pull(wanted, 1, silent)
    placed = world.models.check_files(wanted)
    assert (placed.is_symlink(), placed.read_bytes() == CONTENT) == (True, True)
    assert world.models.shared_storage(wanted) == (storage / "big.gguf",)
    assert await world.models.remove("m")
    assert (storage / "big.gguf").exists()


async def test_a_file_that_does_not_fit_is_refused_with_both_numbers(
    world: World, web: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda _path: 1024 * 1024)
    with pytest.raises(Unavailable, match=r"they need 20\.0 MiB and 1\.0 MiB are free") as caught:
        await world.models.pull(model(f"{web.url}/model.gguf"), 1, silent)
    assert caught.value.code == "insufficient_disk"
    assert web.requests == []


async def test_a_credential_goes_to_its_source_alone_and_a_missing_one_is_named(world: World, web: Faulty) -> None:
    fetcher = world.models._fetcher
    headers = ModelCredentials({}, {"ENGINEHOUSE_CREDENTIAL_HUB": "secret"}).headers
    fetcher._sources = msgspec.structs.replace(fetcher._sources, headers=headers)
    await world.models.pull(model(f"{web.url}/model.gguf", credential="hub"), 1, silent)
    assert {one.headers["authorization"] for one in web.requests} == {"Bearer secret"}
    with pytest.raises(Invalid, match="ENGINEHOUSE_CREDENTIAL_OTHER"):
        await world.models.pull(model(f"{web.url}/model.gguf", name="n", sha256="", credential="other"), 1, silent)
    web.plan(Answer(403), path="model.gguf", times=None)
    with pytest.raises(Denied, match="gated") as caught:
        await world.models.pull(model(f"{web.url}/model.gguf", name="n", sha256="", credential="hub"), 1, silent)
    assert "secret" not in caught.value.message


async def test_an_address_inside_the_network_is_refused(tmp_path: Path, web: Faulty) -> None:
    world = World(tmp_path)
    with pytest.raises(Invalid) as caught:
        await world.models.pull(model(f"{web.url}/model.gguf"), 1, silent)
    assert caught.value.code == "uri_not_allowed"
    await world.made.close()


async def test_what_was_fetched_of_a_removed_model_goes_with_it_and_nothing_else(world: World, web: Faulty) -> None:
    web.files["/other.gguf"] = CONTENT[:-1]
    other = hashlib.sha256(CONTENT[:-1]).hexdigest()
    web.plan(Cut(after_bytes=1_000_000), method="GET", times=None)  # eight of these are not the whole file
    web.plan(Answer(status=404), method="GET", times=None, after=8)
    for wanted in (
        model(f"{web.url}/model.gguf"),
        model(f"{web.url}/other.gguf", other, "kept", size_bytes=len(CONTENT) - 1),
    ):
        with pytest.raises(EnginehouseError):
            await world.models.pull(wanted, 1, silent)
    downloads = world.place.models / DOWNLOADS
    assert {path.name.partition(".")[0] for path in downloads.iterdir()} == {DIGEST, other}
    await world.models.remove("m")
    assert {path.name.partition(".")[0] for path in downloads.iterdir()} == {other}
    web.forget_plans()
    await world.models.pull(model(f"{web.url}/other.gguf", other, "kept", size_bytes=len(CONTENT) - 1), 1, silent)
    assert list(downloads.iterdir()) == []
