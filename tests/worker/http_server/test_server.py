"""Files over HTTP as LocalAI's frontends send them: its statuses and headers, and nothing outside the roots."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.replay.recordings import entries, needs_recordings
from tests.worker.http_server import door
from tests.worker.http_server.door import BASE_PORT, TOKEN, Door, opened
from tests.worker.world import until

from enginehouse.core.errors import Conflict
from enginehouse.worker.http_server import storage, uploads
from enginehouse.worker.http_server.server import HttpOptions, WorkerHttpServer

CONTENT = b"some bytes of a model, " * 120_000


@pytest.fixture
async def files(tmp_path: Path) -> AsyncIterator[Door]:
    async with opened(tmp_path / "worker-1") as made:
        yield made


def _comparable(headers: dict[str, str]) -> dict[str, str]:
    """What a LocalAI frontend reads; lengths of texts differ where texts do."""
    read = ("Range", "X-File-Size", "X-Content-Sha256", "X-Target-Sha256", "Content-Range")
    return {name: value for name, value in headers.items() if name in read}


# Our own words, and the data directory, which exists here.
_OWN_TEXTS = {"bytes 0-109/*"}


@needs_recordings
async def test_every_recorded_exchange_with_the_file_server_has_the_same_answer(files: Door, tmp_path: Path) -> None:
    for entry in entries("33-file-server"):
        if "backend-logs" in entry["path"]:
            continue
        headers = {k: v.replace("<token>", TOKEN) for k, v in (entry.get("headers") or {}).items()}
        sent = {k: v for k, v in headers.items() if k != "Content-Length"}
        body = entry["payload"].encode() if entry.get("payload") else (b"" if entry["method"] == "POST" else None)
        reply = await files.ask(entry["method"], entry["path"], body, sent, token=None)
        if entry["path"] == "/v1/files/data/k.bin":
            assert reply.status == 200, "this worker makes the directory"
            continue
        assert reply.status == entry["status"], (entry, reply)
        assert _comparable(reply.headers) == _comparable(entry["response_headers"]), entry
        _same_body(entry, reply, tmp_path)


def _same_body(entry: dict[str, Any], reply: door.Reply, place: Path) -> None:
    told = entry["response"]
    if isinstance(told, dict) and "local_path" in told:
        assert set(reply.json) == {"local_path"}
        if "localai-output" in told["local_path"]:
            path = Path(reply.json["local_path"])
            assert path.parent == place / "worker-1" / "staging"
            assert (path.name.startswith("localai-output-"), path.suffix) == (True, ".tmp")
        else:
            assert reply.json["local_path"] == told["local_path"].replace("/data/", f"{place}/")
    elif isinstance(told, dict):
        assert reply.json == told
    elif entry.get("headers", {}).get("Content-Range") not in _OWN_TEXTS:
        assert reply.body.decode() == told
        if entry["method"] != "HEAD":
            assert reply.headers.get("Content-Type") == entry["response_headers"].get("Content-Type")


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", TOKEN[:-1], "Bearer", "t\u00e4st"])
async def test_without_the_token_there_is_only_health(files: Door, token: str | None) -> None:
    for method, path in (
        ("GET", "/v1/files/models/a"),
        ("HEAD", "/v1/files/models/a"),
        ("PUT", "/v1/files/models/a"),
        ("POST", "/v1/files/temp"),
        ("GET", "/v1/files-list/models"),
    ):
        reply = await files.ask(method, path, b"x" if method == "PUT" else None, token=token)
        assert reply.status == 401, (method, path)
    assert not list(files.roots.models.iterdir()) + list(files.roots.staging.iterdir())
    assert (await files.ask("GET", "/healthz", token=token)).body == b"ok"


async def test_the_join_token_opens_nothing_at_a_frontend_of_ours_or_before_joining(tmp_path: Path) -> None:
    async with opened(tmp_path) as files:
        files.server.joined(door.node("a-token-of-the-node"))
        for token in (TOKEN, "a-token-of-the-node"):
            assert (await files.ask("GET", "/v1/files/models/a", token=token)).status == 401
    fresh = WorkerHttpServer(HttpOptions(roots=files.roots, join_token="", base_port=BASE_PORT))
    assert not fresh._access.may_use_files("Bearer ")


async def test_a_worker_without_a_token_is_open_only_where_localai_let_it_in_without_one(tmp_path: Path) -> None:
    async with opened(tmp_path, token="") as files:
        assert (await files.ask("GET", "/v1/files/models/a", token=None)).status == 404
        files.server.joined(door.node("a-token-of-the-node"))
        assert (await files.ask("GET", "/v1/files/models/a", token=None)).status == 401


@pytest.mark.parametrize(
    "key",
    [
        *(
            "../secret",
            "models/../../secret",
            "models/%2e%2e/%2e%2e/secret",
            "models/..%2f..%2fsecret",
            "%2e%2e/secret",
        ),
        *("models//etc/passwd", "models/", "models", "data/../secret", "models/a/./b", "models/.hidden/x", "/secret"),
        *("models/a%00b", "models/out/secret", "models/" + "a" * 300, "models/t/model.json", "a/" * 1100 + "b"),
    ],
)
async def test_no_key_leads_out_of_its_root(files: Door, tmp_path: Path, key: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("untouched")
    (files.roots.models / "out").symlink_to(tmp_path)
    for method in ("GET", "HEAD", "PUT"):
        reply = await files.ask(method, f"/v1/files/{key}", b"overwritten" if method == "PUT" else None)
        assert reply.status in (400, 404), (method, key, reply)
        assert b"untouched" not in reply.body
    assert (await files.ask("GET", f"/v1/files-list/{key}")).status in (400, 404)
    assert secret.read_text() == "untouched"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "worker-1"]


async def test_an_upload_that_is_cut_off_goes_on_where_it_ended(files: Door) -> None:
    digest = hashlib.sha256(CONTENT).hexdigest()
    head = (
        f"PUT /v1/files/models/m/m.bin HTTP/1.1\r\nHost: w\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Length: {len(CONTENT)}\r\nContent-Range: bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}\r\n"
        f"X-Content-SHA256: {digest}\r\n\r\n"
    )
    path = files.roots.models / "m" / "m.bin"
    async with asyncio.timeout(20):
        _, writer = await asyncio.open_connection("127.0.0.1", files.port)
        writer.write(head.encode() + CONTENT[:2_000_000])
        await until(lambda: storage.size_of(path) >= uploads.WRITE_BYTES)
        writer.close()
        await writer.wait_closed()
        while True:  # as a LocalAI frontend does: look how far it is, go on there
            seen = await files.ask("HEAD", "/v1/files/models/m/m.bin")
            assert seen.headers["X-Target-Sha256"] == digest
            reply = await files.put("models/m/m.bin", CONTENT, int(seen.headers["X-File-Size"]))
            if reply.status != 416:
                break
    assert int(seen.headers["X-File-Size"]) >= uploads.WRITE_BYTES
    assert (reply.status, path.read_bytes()) == (200, CONTENT)
    seen = await files.ask("HEAD", "/v1/files/models/m/m.bin")
    assert seen.headers["X-Content-Sha256"] == digest


async def test_a_whole_upload_that_is_cut_off_or_wrong_leaves_the_old_file(files: Door) -> None:
    assert (await files.ask("PUT", "/v1/files/models/m/m.bin", b"old")).status == 200
    path = files.roots.models / "m" / "m.bin"
    inode = path.stat().st_ino
    head = (
        f"PUT /v1/files/models/m/m.bin HTTP/1.1\r\nHost: w\r\nAuthorization: Bearer {TOKEN}\r\n"
        "Content-Length: 9\r\n\r\n"
    )
    await files.raw(head.encode(), b"new", is_cut=True)
    wrong = await files.ask("PUT", "/v1/files/models/m/m.bin", b"new", {"X-Content-SHA256": "0" * 64})
    assert wrong.status == 400
    assert path.read_bytes() == b"old"
    assert (await files.ask("PUT", "/v1/files/models/m/m.bin", b"newer")).status == 200
    assert (path.read_bytes(), path.stat().st_ino != inode) == (b"newer", True)
    assert sorted(one.name for one in path.parent.iterdir()) == ["m.bin", "m.bin.sha256"]


async def test_a_file_whose_digest_sidecar_is_older_is_hashed_again(files: Door) -> None:
    await files.ask("PUT", "/v1/files/models/m/m.bin", b"first")
    path = files.roots.models / "m" / "m.bin"
    path.write_bytes(b"second")
    later = time.time_ns() + 10**9
    os.utime(path, ns=(later, later))
    seen = await files.ask("HEAD", "/v1/files/models/m/m.bin")
    assert seen.headers["X-Content-Sha256"] == hashlib.sha256(b"second").hexdigest()


async def test_two_uploads_of_one_file_at_once_leave_one_whole_file(files: Door) -> None:
    others = [bytes([65 + number]) * 3_000_000 for number in range(4)]
    async with asyncio.TaskGroup() as group:
        whole = [group.create_task(files.ask("PUT", "/v1/files/models/m/m.bin", content)) for content in others]
        ranged = [group.create_task(files.put("models/m/r.bin", CONTENT)) for _ in range(4)]
    assert [task.result().status for task in whole] == [200] * 4
    assert (files.roots.models / "m" / "m.bin").read_bytes() in others
    assert sorted(task.result().status for task in ranged) == [200, 416, 416, 416]
    assert (files.roots.models / "m" / "r.bin").read_bytes() == CONTENT


async def test_a_file_that_does_not_fit_is_refused_before_its_first_byte(files: Door) -> None:
    headers = {"Content-Range": f"bytes 0-9/{2**59}", "X-Content-SHA256": "0" * 64}
    reply = await files.ask("PUT", "/v1/files/models/m/m.bin", b"0123456789", headers)
    assert (reply.status, b"are free" in reply.body) == (507, True)
    head = (
        f"PUT /v1/files/models/m/m.bin HTTP/1.1\r\nHost: w\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Length: {uploads.MAX_BODY_BYTES + 1}\r\n\r\n"
    )
    answer = await files.raw(head.encode(), b"", is_cut=False)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert not (files.roots.models / "m" / "m.bin").exists()


async def test_a_body_longer_than_its_range_is_refused(files: Door) -> None:
    headers = {"Content-Range": "bytes 0-4/5", "X-Content-SHA256": hashlib.sha256(b"12345").hexdigest()}
    assert (await files.ask("PUT", "/v1/files/models/m/m.bin", b"1234567", headers)).status == 400
    assert (await files.ask("HEAD", "/v1/files/models/m/m.bin")).status == 404


async def test_ranges_of_a_file_can_be_read(files: Door) -> None:
    await files.ask("PUT", "/v1/files/models/m/m.bin", CONTENT)
    reply = await files.ask("GET", "/v1/files/models/m/m.bin", headers={"Range": "bytes=10-19"})
    assert (reply.status, reply.body) == (206, CONTENT[10:20])


async def test_readiness_follows_the_bus(files: Door) -> None:
    assert (await files.ask("GET", "/readyz")).status == 200
    files.server.heard(1.0, is_bus_away=True)
    reply = await files.ask("GET", "/readyz")
    assert (reply.status, reply.body.startswith(b"not ready: ")) == (503, True)


async def test_a_busy_default_port_moves_down_and_a_given_one_is_an_error(tmp_path: Path) -> None:
    async with opened(tmp_path / "a") as first, opened(tmp_path / "b") as second:
        assert second.port < first.port < BASE_PORT
        roots = first.roots
        given = WorkerHttpServer(HttpOptions(roots=roots, join_token="t", base_port=BASE_PORT, port=first.port))
        with pytest.raises(Conflict, match="another program uses this port"):
            await given.listen("127.0.0.1")


async def test_it_listens_at_one_address_only_and_moves_with_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as files:
        with socket.socket() as probe:
            probe.settimeout(2)
            assert probe.connect_ex(("127.0.0.2", files.port)) != 0
        assert await files.server.listen("127.0.0.2") == files.port
        with socket.socket() as probe:
            probe.settimeout(2)
            assert probe.connect_ex(("127.0.0.2", files.port)) == 0


def test_old_inputs_and_outputs_are_removed_and_models_stay(tmp_path: Path) -> None:
    roots = storage.Roots(models=tmp_path / "models", data=tmp_path / "data", staging=tmp_path / "staging")
    old = time.time() - storage.STAGING_SECONDS - 10
    for root in (roots.models, roots.staging):
        (root / "a").mkdir(parents=True)
        for name in ("old", "new"):
            (root / "a" / name).write_bytes(b"x")
        os.utime(root / "a" / "old", (old, old))
    storage.sweep_staging(roots)
    assert sorted(path.name for path in (roots.staging / "a").iterdir()) == ["new"]
    assert sorted(path.name for path in (roots.models / "a").iterdir()) == ["new", "old"]
