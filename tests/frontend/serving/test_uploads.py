"""Uploads: resumed where they were, verified, kept below one directory, and read by nodes in ranges."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.api.whole_frontend import LOCAL, Answer, Site, site
from tests.core.gguf_files import LLAMA, TENSORS, gguf
from tests.fetch.models.hub import hub

from enginehouse.core.errors import Conflict
from enginehouse.frontend.serving import uploads as module
from enginehouse.frontend.serving.uploads import UploadRange, Uploads

CONTENT = gguf(LLAMA, TENSORS) + bytes(range(256)) * 40
SHA256 = hashlib.sha256(CONTENT).hexdigest()
PATH = f"/api/uploads/{SHA256}"


@pytest.fixture
async def here(tmp_path: Path, sqlite_url: str) -> AsyncIterator[Site]:
    async with hub() as sources, site(tmp_path, sources=sources.sources) as made:
        await made.ask("POST", "/api/nodes/old/approve", token=made.tokens["admin"])
        yield made


async def put(here: Site, start: int, end: int, content: bytes | None = None, path: str = PATH) -> Answer:
    part = CONTENT[start:end] if content is None else content
    headers = (*LOCAL, ("content-range", f"bytes {start}-{end - 1}/{len(CONTENT)}"))
    return await here.ask("PUT", path, part, token=here.tokens["admin"], headers=headers)


async def far(here: Site) -> tuple[int, str, str]:
    answer = await here.ask("HEAD", PATH, token=here.tokens["admin"])
    return answer.status, answer.headers.get("upload-offset", ""), answer.headers.get("upload-complete", "")


async def test_parts_are_appended_and_the_whole_is_verified_and_served_in_ranges(here: Site, tmp_path: Path) -> None:
    assert (await far(here))[0] == 404
    assert (await put(here, 0, 1000)).json == {"offset": 1000, "complete": False}
    assert await far(here) == (200, "1000", "?0")
    node = here.tokens["node"]
    assert (await here.ask("GET", PATH, token=node)).status == 404
    assert (await put(here, 1000, len(CONTENT))).status == 201
    assert await far(here) == (200, str(len(CONTENT)), "?1")
    assert [one.name for one in (tmp_path / "uploads").iterdir()] == [SHA256]
    assert (await here.ask("GET", PATH, token=node, stays=True)).body == CONTENT
    ranged = await here.ask("GET", PATH, token=node, headers=(*LOCAL, ("range", "bytes=100-199")), stays=True)
    assert (ranged.status, ranged.body) == (206, CONTENT[100:200])
    assert ranged.headers["content-range"] == f"bytes 100-199/{len(CONTENT)}"
    wrong = await here.ask("GET", PATH, token=node, headers=(*LOCAL, ("range", "bytes=9-1,x")))
    assert (wrong.status, wrong.error["code"]) == (400, "unsupported")
    assert (await put(here, 0, 10)).status == 201  # it is here already
    body = {
        "name": "mine",
        "files": [{"name": "m.gguf", "uri": f"upload:{SHA256}", "sha256": SHA256, "size_bytes": len(CONTENT)}],
    }
    added = await here.ask("POST", "/api/models", body, token=here.tokens["admin"])
    assert (added.status, added.json["options"]["context_size"]) == (201, 4096)


async def test_an_upload_goes_on_only_where_it_was(here: Site) -> None:
    await put(here, 0, 1000)
    answer = await put(here, 500, 600)
    assert (answer.status, answer.error["code"], answer.json["offset"]) == (409, "wrong_offset", 1000)
    cut = await put(here, 1000, 3000, CONTENT[1000:1700])
    assert (cut.status, cut.error["code"]) == (422, "cut_off")
    assert await far(here) == (200, "1700", "?0")  # what arrived stays
    long = await put(here, 1700, 1800, CONTENT[1700:2000])
    assert long.status == 422
    assert await far(here) == (200, "1700", "?0")
    assert (await put(here, 1700, len(CONTENT))).status == 201


async def test_wrong_bytes_are_refused_and_nothing_of_them_stays(here: Site, tmp_path: Path) -> None:
    await put(here, 0, 1000, b"x" * 1000)
    answer = await put(here, 1000, len(CONTENT))
    assert (answer.status, answer.error["code"]) == (422, "digest_mismatch")
    assert list((tmp_path / "uploads").iterdir()) == []


@pytest.mark.parametrize("name", ["x", "..", "A" * 64, "0" * 63, "%2e%2e%2fetc", "0" * 64 + ".part"])
async def test_a_name_never_becomes_a_path(here: Site, tmp_path: Path, name: str) -> None:
    assert (await put(here, 0, 10, path=f"/api/uploads/{name}")).status in (404, 422)
    assert not (tmp_path / "uploads").exists()


@pytest.mark.parametrize("header", ["", "bytes 5-2/9", "bytes 0-9/9", "bytes */9", "lines 0-1/9", "bytes 0-1/*"])
async def test_a_part_says_which_it_is(here: Site, header: str) -> None:
    headers = (*LOCAL, ("content-range", header)) if header else LOCAL
    answer = await here.ask("PUT", PATH, b"12", token=here.tokens["admin"], headers=headers)
    assert answer.status == 400


async def test_an_upload_that_does_not_fit_the_disk_is_refused_before_it_begins(here: Site) -> None:
    headers = (*LOCAL, ("content-range", f"bytes 0-1/{10**14}"))
    answer = await here.ask("PUT", PATH, b"12", token=here.tokens["admin"], headers=headers)
    assert (answer.status, answer.error["code"]) == (503, "disk_full")


async def test_two_uploads_of_one_file_at_once_do_not_mix(here: Site) -> None:
    uploads = here.frontend.model_rows.uploads

    async def body() -> AsyncIterator[bytes]:
        with pytest.raises(Conflict):
            await uploads.write(SHA256, UploadRange(0, 10, len(CONTENT)), body())
        yield CONTENT

    assert (await uploads.write(SHA256, UploadRange(0, len(CONTENT), len(CONTENT)), body())).is_complete


async def test_frontends_that_share_a_directory_do_not_mix_either(here: Site, tmp_path: Path) -> None:
    mine, other = (Uploads(tmp_path / "uploads", here.store) for _ in range(2))

    async def body() -> AsyncIterator[bytes]:
        with pytest.raises(Conflict):
            await other.write(SHA256, UploadRange(0, 10, len(CONTENT)), body())
        yield CONTENT

    assert (await mine.write(SHA256, UploadRange(0, len(CONTENT), len(CONTENT)), body())).is_complete


async def test_old_uploads_that_no_model_needs_are_removed(here: Site, tmp_path: Path) -> None:
    await put(here, 0, len(CONTENT))
    uploads: Uploads = here.frontend.model_rows.uploads
    old = time.time() - module.KEPT_SECONDS - 10
    body = {"name": "mine", "files": [{"name": "m.gguf", "uri": f"upload:{SHA256}", "sha256": SHA256}]}
    await here.ask("POST", "/api/models", body, token=here.tokens["admin"])
    stored = tmp_path / "uploads" / SHA256
    os.utime(stored, (old, old))
    await uploads.step()
    assert stored.exists()
    await here.ask("DELETE", "/api/models/mine", token=here.tokens["admin"])
    await uploads.step()
    assert not stored.exists()
