"""What the server hands out of itself: the script that joins a machine, and the wheel that the script installs."""

from __future__ import annotations

import hashlib
import io
import re
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.api.whole_frontend import Site, site

from enginehouse.core.errors import Unavailable
from enginehouse.host.program import pinned_pip


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as made:
        yield made


def value_of(script: str, name: str) -> str:
    found = re.search(rf"^{name}='([^']*)'", script, re.MULTILINE)
    assert found, name
    return found[1]


async def test_the_script_names_the_wheel_that_is_served_with_its_sha256(here: Site) -> None:
    script = (await here.ask("GET", "/join.sh", stays=True)).body.decode()
    assert script.startswith("#!/bin/sh\n")
    wheel = await here.ask("GET", f"/join/{value_of(script, 'WHEEL')}", stays=True)
    assert wheel.status == 200
    assert hashlib.sha256(wheel.body).hexdigest() == value_of(script, "WHEEL_SHA256")
    assert int(wheel.headers["content-length"]) == len(wheel.body)
    with zipfile.ZipFile(io.BytesIO(wheel.body)) as archive:
        assert archive.testzip() is None
        assert b"--hash=sha256:" in archive.read("enginehouse/requirements.txt")
        assert {name.split("/")[0] for name in archive.namelist()} == {
            "enginehouse",
            f"enginehouse-{value_of(script, 'VERSION')}.dist-info",
        }


async def test_an_unchanged_wheel_is_not_sent_again(here: Site) -> None:
    script = await here.ask("GET", "/join.sh", stays=True)
    same = [("if-none-match", script.headers["etag"])]
    path = f"/join/{value_of(script.body.decode(), 'WHEEL')}"
    etag = (await here.ask("GET", path, stays=True)).headers["etag"]
    assert (await here.ask("GET", path, headers=[("if-none-match", etag)])).status == 304
    assert (await here.ask("GET", path, headers=[("if-none-match", '"other"')], stays=True)).status == 200
    assert (await here.ask("GET", "/join.sh", headers=same, stays=True)).status == 304


async def test_the_script_has_nothing_of_the_request_and_nothing_of_the_server(here: Site, tmp_path: Path) -> None:
    plain = (await here.ask("GET", "/join.sh", stays=True)).body
    hostile = [("host", "evil';reboot;'"), ("x-forwarded-host", "$(reboot)"), ("x-forwarded-proto", "`reboot`")]
    assert (await here.ask("GET", "/join.sh", stays=True, headers=hostile)).body == plain
    secrets = [here.tokens["admin"], here.tokens["join"], str(tmp_path)]
    wheel = (await here.ask("GET", f"/join/{value_of(plain.decode(), 'WHEEL')}", stays=True)).body
    for content in (plain, wheel):
        assert [one for one in secrets if one.encode() in content] == []


@pytest.mark.parametrize("name", ["enginehouse-0.0.0-py3-none-any.whl", "..", "%2e%2e%2fadmin.token", "join.sh"])
async def test_nothing_else_is_handed_out(here: Site, name: str) -> None:
    assert (await here.ask("GET", f"/join/{name}")).status == 404


async def test_pip_is_handed_out_as_it_is_pinned_and_an_unreachable_index_is_said(
    here: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = pinned_pip()

    def unreachable(*_: object) -> bytes:
        raise Unavailable("cannot hand out pip: no index")

    monkeypatch.setattr("enginehouse.fetch.pip_wheel._download", unreachable)
    answer = await here.ask("GET", f"/join/{pinned.file_name}")
    assert (answer.status, answer.error["message"]) == (503, "cannot hand out pip: no index")
    # A file of that name in the data directory counts only with the pinned hash.
    kept = tmp_path / "program" / pinned.file_name
    kept.parent.mkdir(exist_ok=True)
    kept.write_bytes(b"another pip")
    assert (await here.ask("GET", f"/join/{pinned.file_name}")).status == 503
