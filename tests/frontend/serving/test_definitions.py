"""Model rows: added from sources and configurations, changed, copied, exported, with nothing half done."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.api.whole_frontend import Answer, Site, site
from tests.core.gguf_files import LLAMA, TENSORS, gguf
from tests.fetch.models.hub import COMMIT, Hub, hub

from enginehouse.core.errors import Unavailable
from enginehouse.core.ids import NodeId
from enginehouse.core.replica import Replica
from enginehouse.fetch.galleries.documents import read_mappings
from enginehouse.store import db, models, operations, replicas

MODEL = gguf(LLAMA, TENSORS)


class Shop:
    """A frontend whose sources are a hub on loopback."""

    def __init__(self, here: Site, sources: Hub) -> None:
        self.site = here
        self.hub = sources

    async def ask(self, method: str, path: str, body: object = None) -> Answer:
        return await self.site.ask(method, path, body, token=self.site.tokens["admin"])

    async def good(self, method: str, path: str, body: object = None) -> Any:
        answer = await self.ask(method, path, body)
        assert answer.status < 300, answer.body
        return answer.json

    async def refused(self, method: str, path: str, body: object = None) -> tuple[int, str, str]:
        answer = await self.ask(method, path, body)
        assert answer.status >= 400, answer.body
        return answer.status, answer.error["code"], answer.error["message"]

    async def names(self) -> list[str]:
        return [model.name for model, _ in await self.site.store.transaction(models.every)]


@pytest.fixture
async def shop(tmp_path: Path, sqlite_url: str) -> AsyncIterator[Shop]:
    async with hub({"mine": "s3cret"}) as sources, site(tmp_path, sources=sources.sources) as here:
        await here.ask("POST", "/api/nodes/old/approve", token=here.tokens["admin"])
        sources.add_repository(
            "o/r", {"m-Q4_K_M.gguf": MODEL, "m-Q8_0.gguf": MODEL + b"8"}, cardData={"license": "mit"}
        )
        sources.server.files["/f.gguf"] = MODEL
        yield Shop(here, sources)


async def test_a_model_is_added_from_a_repository_with_its_licence_and_choice(shop: Shop) -> None:
    added = await shop.good("POST", "/api/models", {"name": "chat", "sources": ["hf:o/r"], "replicas": 2})
    assert (added["license"], added["backend"], added["replicas"]) == ("mit", "llama-cpp", 2)
    assert added["files"][0]["uri"].endswith(f"/o/r/resolve/{COMMIT}/m-Q4_K_M.gguf")
    assert added["options"]["context_size"] == 4096
    assert "chose Q4_K_M" in added["remarks"][0]
    assert any("LocalAI's workers" in one for one in added["warnings"])  # the only node is one
    shown = await shop.good("GET", "/api/models/chat")
    assert (shown["revision"], shown["config"]) == (added["revision"], added["config"])
    assert await shop.names() == ["chat"]


async def test_a_dry_run_says_all_and_stores_nothing(shop: Shop) -> None:
    body = {"name": "chat", "sources": ["hf:o/r"], "dry_run": True}
    assert (await shop.good("POST", "/api/models", body))["is_stored"] is False
    assert await shop.names() == []


async def test_a_name_that_is_taken_is_a_conflict_and_the_same_request_is_not(shop: Shop) -> None:
    body = {"name": "chat", "sources": ["hf:o/r"]}
    first = await shop.good("POST", "/api/models", body)
    assert (await shop.good("POST", "/api/models", body))["revision"] == first["revision"]
    status, code, message = await shop.refused("POST", "/api/models", {**body, "sources": ["hf:o/r:Q8_0"]})
    assert (status, code) == (409, "conflict")
    assert "choose another name" in message


async def test_a_digest_that_was_recorded_later_makes_no_other_definition(shop: Shop) -> None:
    body = {"name": "web", "sources": [f"{shop.hub.server.url}/f.gguf"]}
    assert (await shop.good("POST", "/api/models", body))["files"][0]["sha256"] == ""
    row = await shop.site.store.transaction(lambda connection: models.get(connection, "web"))
    assert row is not None
    pinned = msgspec.structs.replace(row.files[0], sha256="a" * 64)
    after = msgspec.structs.replace(row, files=(pinned,))
    await shop.site.store.transaction(lambda connection: models.replace(connection, after))
    await shop.good("POST", "/api/models", body)
    assert (await shop.good("GET", "/api/models/web"))["files"][0]["sha256"] == "a" * 64


async def test_a_load_comes_with_the_row_or_not_at_all(shop: Shop) -> None:
    body = {"name": "chat", "sources": ["hf:o/r"], "load": True}
    answer = await shop.ask("POST", "/api/models", body)
    assert (answer.status, answer.json["model"]["name"]) == (202, "chat")
    (operation,) = await shop.site.store.transaction(lambda connection: operations.recent(connection, 10))
    assert (operation.id, operation.kind, operation.name) == (answer.json["jobID"], "load", "chat")
    await shop.refused("POST", "/api/models", {**body, "sources": ["hf:o/r:Q8_0"]})
    assert len(await shop.site.store.transaction(lambda connection: operations.recent(connection, 10))) == 1


@pytest.mark.parametrize(
    ("body", "code", "word"),
    [
        ({"name": "x", "sources": ["hf:o/gone"]}, "not_found", "check the name"),
        ({"name": "x", "sources": ["hf:o/r"], "backend": "nothing"}, "unknown_backend", "backends available"),
        ({"name": "x", "sources": ["./x.gguf"]}, "invalid_uri", "hf:ORG/REPO"),
        ({"name": "x", "sources": ["hf:o/r"], "credential": "none"}, "invalid_name", "ENGINEHOUSE_CREDENTIAL_NONE"),
        ({"name": "x"}, "unsupported", "no files"),
        ({"name": " x", "sources": ["hf:o/r"]}, "invalid_name", "spaces"),
        ({"name": "x", "sources": ["hf:o/r"], "config": {"mmproj": "../p"}}, "invalid_name", "relative path"),
        ({"name": "x", "sources": ["hf:o/r"], "config": {"mmproj": "p.gguf"}}, "unsupported", "has no source"),
        ({"name": "x", "files": [{"name": "../a", "uri": "hf:o/r", "sha256": ""}]}, "invalid_name", "relative path"),
        ({"name": "x", "files": [{"name": "a", "uri": "ftp://h/a", "sha256": ""}]}, "invalid_uri", "source"),
        ({"name": "x", "config": {"alias": "y"}, "sources": ["hf:o/r"]}, "unsupported", "leave out one of them"),
        ({"name": "x", "sources": ["alias:y"]}, "model_not_found", "'y'"),
        ({"name": "x", "sources": ["alias:x"]}, "invalid_name", "of itself"),
        ({"name": "x", "sources": ["alias:"]}, "invalid_name", "name"),
        ({"name": "x", "sources": ["hf:o/r"], "replicas": 0}, "invalid_name", "replicas"),
        ({"name": "x", "sources": ["http://127.0.0.1:9/v1", "hf:o/r"]}, "unsupported", "only source"),
        ({"name": "x", "sources": ["http://10.0.0.1:9/v1"]}, "uri_not_allowed", "--allow-host"),
        ({"name": "x", "sources": ["http://169.254.169.254/v1"]}, "uri_not_allowed", "--allow-host"),
        ({"name": "x", "sources": ["https://127.0.0.1:9/v1"]}, "unsupported", "proxy"),
        (
            {"name": "x", "files": [{"name": "a.gguf", "uri": f"upload:{'0' * 64}", "sha256": ""}]},
            "not_found",
            "upload",
        ),
    ],
)
async def test_what_cannot_be_added_is_refused_with_what_to_do(shop: Shop, body: Any, code: str, word: str) -> None:
    _, found, message = await shop.refused("POST", "/api/models", body)
    assert (found, word in message) == (code, True), message
    assert await shop.names() == []


async def test_the_secret_of_a_credential_is_never_shown(shop: Shop) -> None:
    answer = await shop.ask("POST", "/api/models", {"name": "x", "sources": ["hf:o/r"], "credential": "mine"})
    assert b"s3cret" not in answer.body
    assert answer.json["files"][0]["credential"] == "mine"
    assert shop.hub.server.requests[0].headers["authorization"] == "Bearer s3cret"


async def test_a_changed_configuration_says_that_running_replicas_are_replaced(shop: Shop) -> None:
    added = await shop.good("POST", "/api/models", {"name": "chat", "sources": ["hf:o/r"]})
    node = NodeId(shop.site.tokens["node id"])
    running = Replica(
        node_id=node, model="chat", slot=0, revision=added["revision"], address="h:1", nonce="n", backend="b"
    )
    await shop.site.store.transaction(lambda connection: replicas.put(connection, running, db.now(connection)))
    changed = await shop.good("PATCH", "/api/models/chat", {"config": {"context_size": 99, "nonsense": 1}})
    assert changed["revision"] != added["revision"]
    assert changed["files"] == added["files"]
    assert changed["options"]["context_size"] == 99
    assert any("`nonsense` has no effect" in one for one in changed["warnings"])
    assert "are replaced one after the other" in changed["remarks"][0]
    assert changed["running"] == [{"node_name": "old", "slot": 0, "is_current": False}]
    removed = await shop.good("PATCH", "/api/models/chat", {"config": {"nonsense": None}})
    assert "nonsense" not in removed["config"]
    stale = {"config": {"context_size": 1}, "revision": added["revision"]}
    status, _, message = await shop.refused("PATCH", "/api/models/chat", stale)
    assert (status, "changed meanwhile" in message) == (409, True)
    assert (await shop.refused("PUT", "/api/models/chat", {"config": {"name": "other"}}))[1] == "invalid_name"
    assert (await shop.refused("PATCH", "/api/models/gone", {}))[0] == 404


async def test_a_configuration_that_is_nested_without_end_is_refused(shop: Shop) -> None:
    await shop.good("POST", "/api/models", {"name": "chat", "sources": ["hf:o/r"]})
    for opening, closing in (('{"a":', "}"), ("[", "]")):
        deep = opening * 300 + "1" + closing * 300
        body = f'{{"name": "x", "sources": ["hf:o/r"], "config": {{"k": {deep}}}}}'.encode()
        assert "nested deeper" in (await shop.refused("POST", "/api/models", body))[2]
        changed = f'{{"config": {{"k": {deep}}}}}'.encode()
        assert "nested deeper" in (await shop.refused("PATCH", "/api/models/chat", changed))[2]


async def test_a_copy_has_the_same_files_under_its_own_name(shop: Shop) -> None:
    added = await shop.good("POST", "/api/models", {"name": "chat", "sources": ["hf:o/r"]})
    copied = await shop.good("POST", "/api/models/chat/copy", {"name": "team/chat"})
    assert (copied["name"], copied["config"]["name"]) == ("team/chat", "team/chat")
    assert (copied["files"], copied["was_there"]) == (added["files"], False)
    again = await shop.good("POST", "/api/models/chat/copy", {"name": "team/chat"})
    assert again == {**copied, "was_there": True}, "nothing was copied"
    assert (await shop.good("GET", "/api/models/team/chat"))["name"] == "team/chat"
    assert (await shop.refused("POST", "/api/models/tiny-chat/copy", {"name": "chat"}))[0] == 409
    assert (await shop.refused("POST", "/api/models/gone/copy", {"name": "new"}))[0] == 404


IMPORTED = """\
name: small
backend: llama-cpp
x_unknown: [1, two, {three: 3.5}]
context_size: 2048
f16: true
flash_attention: "on"
parameters:
  model: small.gguf
  temperature: 0.2
  top_k: 40
stopwords:
  - "<|end|>"
  - "1.10"
template:
  chat: small-chat
  completion: |
    {{.Input}}
    and more
prompt_templates:
  - name: small-chat
    content: "{{.Input}} it\\'s"
download_files:
  - filename: small.gguf
    uri: URL/f.gguf
    sha256: SHA
---
- name: second
  backend: llama-cpp
  parameters: {model: "huggingface://o/r/m-Q8_0.gguf"}
"""


async def test_an_import_keeps_every_field_and_an_export_gives_them_back(shop: Shop) -> None:
    import hashlib

    text = IMPORTED.replace("URL", shop.hub.server.url).replace("SHA", hashlib.sha256(MODEL).hexdigest())
    found = await shop.good("POST", "/models/import", text.encode())
    small, second = found["models"]
    assert (small["files"][0]["name"], small["options"]["context_size"]) == ("small.gguf", 2048)
    assert any("x_unknown" in one for one in small["warnings"])
    assert second["files"][0]["name"] == "m-Q8_0.gguf"
    written = (await shop.ask("GET", "/api/models/small/export")).body
    (again,) = read_mappings(written, "the export")
    (expected, _) = read_mappings(text.encode(), "the import")
    templates = expected.pop("prompt_templates")
    expected["template"]["chat"] = templates[0]["content"]
    assert again == expected
    assert list(again) == list(expected)
    assert list(again["parameters"]) == ["model", "temperature", "top_k"]
    await shop.good("DELETE", "/api/models/small")
    assert (await shop.good("POST", "/models/import", written))["models"][0]["revision"] == small["revision"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "send YAML"),
        ("just text", "must be a mapping"),
        ("- 1", "must be a mapping"),
        ("{name: a", "as YAML"),
        ("backend: llama-cpp", "has no `name`"),
        ("name: a\nbackend: llama-cpp\nparameters: {model: a.gguf}", "download_files"),
        ("name: a\ndownload_files: [{filename: x}]", "needs a `uri`"),
        ("name: a\nartifacts: [{source: {type: other}}]", "huggingface"),
        ("name: a\nbackend: llama-cpp\nparameters: {model: /etc/passwd}", "relative path"),
        ("name: a\ndownload_files: [{filename: ../x, uri: 'hf:o/r/m-Q8_0.gguf'}]", "relative path"),
        ("name: a\ndownload_files: [{uri: 'hf:o/r/m-Q8_0.gguf', sha256: abc}]", "64 hexadecimal"),
        ("name: a\ndownload_files: [{uri: 'hf:o/r/m-Q8_0.gguf', sha256: " + "0" * 64 + "}]", "its sha256 is"),
    ],
)
async def test_an_import_is_all_or_nothing(shop: Shop, text: str, word: str) -> None:
    good = "name: fine\nbackend: llama-cpp\nparameters: {model: 'hf:o/r'}\n---\n" if text else ""
    _, _, message = await shop.refused("POST", "/models/import", (good + text).encode())
    assert word in message
    assert await shop.names() == []


async def test_an_import_can_come_from_an_address(shop: Shop) -> None:
    shop.hub.server.files["/m.yaml"] = b"name: far\nparameters: {model: 'hf:o/r'}\n"
    found = await shop.good("POST", f"/models/import?url={shop.hub.server.url}/m.yaml")
    assert [one["name"] for one in found["models"]] == ["far"]
    assert (await shop.refused("POST", "/models/import?url=file:///etc/passwd"))[1] == "uri_not_allowed"


async def test_a_gguf_that_is_cut_off_is_refused(shop: Shop) -> None:
    shop.hub.server.files["/cut.gguf"] = MODEL[:80]
    body = {"name": "x", "sources": [f"{shop.hub.server.url}/cut.gguf"]}
    assert "cut off" in (await shop.refused("POST", "/api/models", body))[2]


async def test_a_server_elsewhere_is_a_model_with_a_route_and_no_node(shop: Shop) -> None:
    url = f"{shop.hub.server.url}/v1"
    added = await shop.good("POST", "/api/models", {"name": "far", "sources": [url], "credential": "mine"})
    assert added["endpoint"] == shop.hub.server.address
    await shop.site.frontend.router.step()
    route = await shop.site.frontend.router.acquire("far")
    assert (route.node_id, route.address, route.key) == ("", shop.hub.server.address, "s3cret")
    shop.site.frontend.router.release(route)
    shop.site.frontend.router.drop(route)
    for _ in range(2):  # tried again with a later step
        await shop.site.frontend.router.step()
    assert (await shop.site.frontend.router.acquire("far")).address == route.address
    listed = {one["name"]: one["state"] for one in await shop.good("GET", "/api/models")}
    assert listed["far"] == "loaded"
    assert (await shop.refused("POST", "/api/models/far/load", {}))[1] == "unsupported"
    assert (await shop.refused("GET", "/api/models/far/export"))[1] == "unsupported"
    await shop.good("DELETE", "/api/models/far")
    await shop.site.frontend.router.step()
    assert [one.model for one in shop.site.frontend.router.routes()] == []


async def test_an_alias_is_answered_by_its_model_and_has_nothing_of_its_own(shop: Shop) -> None:
    site, router = shop.site, shop.site.frontend.router
    url = f"{shop.hub.server.url}/v1"
    await shop.good("POST", "/api/models", {"name": "far", "sources": [url]})
    await shop.good("POST", "/api/models", {"name": "chat", "sources": ["hf:o/r"]})
    imported = b"name: gpt-4\nalias: far\ndescription: what the application asks for\n"
    await shop.good("POST", "/models/import", imported)
    await router.step()
    route = await router.acquire("gpt-4")
    assert (route.model, route.address) == ("far", shop.hub.server.address)
    router.release(route)
    assert router.in_flight == 0
    listed = {one["name"]: (one["state"], one["description"]) for one in await shop.good("GET", "/api/models")}
    assert listed["gpt-4"] == ("loaded", "what the application asks for")
    exported = await shop.ask("GET", "/api/models/gpt-4/export")
    assert sorted(exported.body.splitlines()) == sorted(imported.splitlines())
    # Another hop, or a change of kind, is refused; another target is not.
    assert "'far'" in (await shop.refused("POST", "/api/models", {"name": "again", "sources": ["alias:gpt-4"]}))[2]
    assert (await shop.refused("PATCH", "/api/models/chat", {"config": {"alias": "far"}}))[1] == "unsupported"
    await shop.good("PATCH", "/api/models/gpt-4", {"config": {"alias": "chat"}})
    await router.step()
    # A load of it is one of its model, and is not shown as one of the alias.
    load = await shop.ask("POST", "/api/models/gpt-4/load", {})
    (operation, *_) = await site.store.transaction(lambda connection: operations.recent(connection, 10))
    assert (load.status, operation.kind, operation.name) == (202, "load", "chat")
    await shop.good("DELETE", "/api/models/gpt-4")
    await router.step()
    assert await shop.names() == ["chat", "far"]


async def test_a_request_that_comes_before_an_alias_is_known_is_told_to_come_again(shop: Shop) -> None:
    await shop.good("POST", "/api/models", {"name": "chat", "sources": ["hf:o/r"]})
    await shop.site.frontend.router.step()
    await shop.good("POST", "/api/models", {"name": "new", "sources": ["alias:chat"]})
    with pytest.raises(Unavailable, match="was just added") as refused:
        await shop.site.frontend.router.acquire("new")
    assert refused.value.retry_after_seconds == 1.0


async def test_the_address_of_a_companion_becomes_the_name_of_its_file(shop: Shop) -> None:
    shop.hub.server.files["/p.gguf"] = gguf({"general.architecture": "clip"})
    url = f"{shop.hub.server.url}/p.gguf"
    text = f"name: sees\nbackend: llama-cpp\nparameters: {{model: 'hf:o/r'}}\nmmproj: {url}\n"
    (found,) = (await shop.good("POST", "/models/import", text.encode()))["models"]
    assert [file["name"] for file in found["files"]] == ["m-Q4_K_M.gguf", "p.gguf"]
    assert (found["config"]["mmproj"], found["config"]["parameters"]["model"]) == ("p.gguf", "hf:o/r")
    assert found["config"]["download_files"] == [{"filename": "p.gguf", "uri": url}]
    added = await shop.good("POST", "/api/models", {"name": "two", "sources": ["hf:o/r", url]})
    assert (added["config"]["mmproj"], len(added["files"])) == ("p.gguf", 2)
