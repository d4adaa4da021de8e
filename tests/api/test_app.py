"""The table in front of the framework: which requests it takes, and that it changes no answer."""

from __future__ import annotations

from pathlib import Path

from tests.api.whole_frontend import site


async def test_the_table_has_the_inference_routes_without_parameters_and_nothing_else(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        names = ("chat/completions", "completions", "embeddings")
        assert {f"{prefix}/{name}".encode() for prefix in ("/v1", "") for name in names} <= set(here.open.endpoints)
        assert not any(b"{" in path or path.startswith(b"/api") for path in here.open.endpoints)
        assert all(path == shown.encode() for path, (shown, _) in here.open.endpoints.items())


async def test_another_method_on_a_path_of_the_table_is_told_which_one_it_takes(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        for method in ("GET", "DELETE", "PUT"):
            answer = await here.ask(method, "/chat/completions", token=here.tokens["user"])
            assert (answer.status, answer.headers["allow"]) == (405, "POST")


async def test_a_request_in_the_table_needs_its_role(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        for role, status in (("", 401), ("join", 403)):
            answer = await here.ask("POST", "/v1/chat/completions", {"model": "x"}, token=here.tokens[role])
            assert answer.status == status
            assert answer.error["code"]
