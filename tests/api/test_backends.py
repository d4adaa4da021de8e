"""The routes of galleries: what is offered and how fresh it is, whatever became of one source."""

from __future__ import annotations

from pathlib import Path

from tests.api.whole_frontend import site

from enginehouse.core.gallery_source import GallerySource
from enginehouse.fetch.galleries.sources import Sources
from enginehouse.fetch.http.addresses import Rules
from enginehouse.fetch.http.client import Client
from enginehouse.frontend.galleries import Galleries
from enginehouse.settings.programs import FrontendSettings


async def test_a_frontend_offers_its_galleries_and_says_of_each_how_fresh_it_is(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        token = here.tokens["admin"]
        offered = (await here.ask("GET", "/backends/available", token=token)).json
        assert all(one["gallery"] == {"url": "builtin:", "name": "enginehouse"} for one in offered)
        assert offered[0]["capabilities"] == {"default": "xllamacpp"}
        assert offered[1]["uri"].startswith("pypi:xllamacpp==")
        assert "capabilities" not in offered[1]
        assert {(one["name"], one["gallery"]["name"], one["fits"]) for one in offered} == {
            ("llama-cpp", "enginehouse", False),
            ("xllamacpp", "enginehouse", False),
            ("llama-cpp-grpc", "enginehouse", False),
            ("minilm", "enginehouse", False),
        }
        assert (await here.ask("POST", "/api/nodes/old/approve", token=token)).status == 200
        offered = (await here.ask("GET", "/backends/available", token=token)).json
        assert [(one["is_meta"], one["is_variant"], one["fits"], one["stale"]) for one in offered] == [
            (True, False, True, False),
            (False, True, True, False),
            (False, False, True, False),
            (False, False, True, False),
        ]
        states = (await here.ask("GET", "/backends/galleries", token=token)).json
        assert [(one["name"], one["status"]) for one in states] == [
            ("enginehouse", "built-in"),
            ("localai", "never loaded"),
        ]
        await here.frontend.galleries.close()


async def test_a_source_that_cannot_be_had_fails_no_loop(tmp_path: Path) -> None:
    """The step ends in order and the state says why; a failing loop would make the frontend unready."""
    source = GallerySource(name="far", url="http://127.0.0.1:9/index.yaml")
    settings = FrontendSettings(data=tmp_path, backend_galleries=(source,))
    client = Client(Rules(settings.allowed_hosts))
    galleries = Galleries([], Sources(settings.backend_galleries, client, tmp_path))
    await galleries.restore()
    await galleries.step()
    (state,) = galleries.states()
    assert (state.status, state.entries) == ("never loaded", 0)
    assert "127.0.0.1" in state.error
    await galleries.close()
