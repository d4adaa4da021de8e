"""Where a worker finds its bus: what was set, else what the frontend tells, else a sentence that says what to set."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.bus.server import plain_server

from enginehouse import build_worker
from enginehouse.core.errors import Invalid
from enginehouse.core.ids import NodeId
from enginehouse.core.node_api import RegisterReply
from enginehouse.settings.programs import WorkerSettings, load


def reply(nats_url: str = "") -> RegisterReply:
    return RegisterReply(
        id=NodeId("node-1"), name="one", node_type="backend", status="healthy", created_at="", nats_url=nats_url
    )


def settings(tmp_path: Path, **variables: str) -> WorkerSettings:
    return load(WorkerSettings, {"url": "http://127.0.0.1:1", "token": "t", "data": str(tmp_path)}, variables)


@pytest.mark.parametrize("variable", ["ENGINEHOUSE_NATS_URL", "LOCALAI_NATS_URL"])
async def test_what_was_set_wins_over_what_the_frontend_tells(tmp_path: Path, variable: str) -> None:
    async with plain_server(tmp_path, 'user: worker, password: "secret"') as place:
        known = settings(tmp_path, **{variable: f"nats://worker:secret@{place}"})
        bus = await build_worker._open_bus(known, reply("nats://127.0.0.1:1"))
        assert bus.is_connected
        await bus.close()


async def test_without_a_setting_it_is_what_the_frontend_tells(tmp_path: Path) -> None:
    async with plain_server(tmp_path) as place:
        bus = await build_worker._open_bus(settings(tmp_path), reply(f"nats://{place}"))
        assert bus.is_connected
        await bus.close()


async def test_without_either_it_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="set --nats-url, ENGINEHOUSE_NATS_URL or LOCALAI_NATS_URL") as caught:
        await build_worker._open_bus(settings(tmp_path), reply())
    assert "http://127.0.0.1:1 does not report its address" in caught.value.message


def test_a_refused_address_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(Invalid) as caught:
        settings(tmp_path, ENGINEHOUSE_NATS_URL="nats://worker:secret@host\x07")
    assert "secret" not in caught.value.message
