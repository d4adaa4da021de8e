"""A worker asks its server whether it is reached, keeps the answer, and says once when that changes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.recorded import Answer, Recorded, recorded, refused

from enginehouse.link.client import FrontendClient
from enginehouse.worker.reach import AFTER_FAILURE_SECONDS, AGAIN_SECONDS, ReachWatch

PATH = "/api/node/the-id/reach"
REACHED = Answer({"area": "reach", "level": "ok", "message": "attic is reached at h:1"})
SHUT = Answer({"area": "reach", "level": "problem", "message": "attic is not reached from the server: refused"})


class Watched:
    def __init__(self, world: Recorded, directory: Path) -> None:
        self.world = world
        self.now = 0.0
        self.token = "the-token-of-the-node"
        self.kept = directory / "reach.json"
        self.client = FrontendClient(world.url, "join-token", user_agent="tests")
        (directory / "node.json").write_text(json.dumps({"id": "the-id", "name": "attic"}))
        self.watch = ReachWatch([self.client], directory / "node.json", lambda: self.token, lambda: self.now)

    async def after(self, seconds: float) -> None:
        self.now += seconds
        await self.watch.step()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with recorded({f"GET {PATH}": [REACHED, SHUT, REACHED]}) as world:
        made = Watched(world, tmp_path)
        yield made
        made.client.close()


async def test_the_answer_is_kept_and_a_change_is_logged_once(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "enginehouse"):
        await watched.after(0)
        assert json.loads(watched.kept.read_text())["finding"]["level"] == "ok"
        assert caplog.messages == []
        await watched.after(AGAIN_SECONDS - 1)
        assert len(watched.world.requests) == 1, "not yet again"
        await watched.after(1)
        assert json.loads(watched.kept.read_text())["finding"]["level"] == "problem"
        await watched.after(AFTER_FAILURE_SECONDS)
    assert [message.partition(" ")[0] for message in caplog.messages] == ["worker.not_reached", "worker.reached_again"]
    assert {one.headers["Authorization"] for one in watched.world.requests} == {"Bearer the-token-of-the-node"}


async def test_before_it_has_joined_nobody_is_asked(watched: Watched) -> None:
    watched.token = ""
    await watched.after(0)
    assert watched.world.requests == []
    assert not watched.kept.exists()


@pytest.mark.parametrize("status", [404, 403, 503])
async def test_a_server_that_cannot_say_it_is_no_trouble(watched: Watched, status: int) -> None:
    watched.world.answers[f"GET {PATH}"] = refused(status, "no", "x")
    await watched.after(0)
    assert not watched.kept.exists()
