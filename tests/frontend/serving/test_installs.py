"""Models of galleries: a local gallery in LocalAI's forms is installed entry by entry, through the routes."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.api.whole_frontend import site
from tests.core.gguf_files import LLAMA, TENSORS, gguf
from tests.fetch.models.hub import hub
from tests.frontend.serving.test_definitions import Shop

from enginehouse.core.gallery_source import GallerySource

MODEL = gguf(LLAMA, TENSORS)
SHA256 = hashlib.sha256(MODEL).hexdigest()
INDEX = """
- name: by-url
  url: file://DIRECTORY/base.yaml
  license: apache-2.0
  description: A chat model
  tags: [chat]
  overrides: {parameters: {model: m.gguf}, context_size: 100}
  files: [{filename: m.gguf, uri: "huggingface://o/r/m-Q4_K_M.gguf", sha256: SHA}]
  variants: [{model: big}]
- name: big
  url: file://DIRECTORY/base.yaml
  overrides: {parameters: {model: big.gguf}}
  files: [{filename: big.gguf, uri: "huggingface://o/r/m-Q8_0.gguf"}]
- name: inline
  config_file: {backend: llama-cpp, parameters: {model: m.gguf}}
  files: [{filename: m.gguf, uri: "URL/f.gguf", sha256: SHA}]
- name: escaped
  url: file://DIRECTORY/escaped.yaml
  overrides: {parameters: {model: m.gguf}}
  files: [{filename: m.gguf, uri: "URL/f.gguf"}]
- name: over-http
  url: URL/base.yaml
  overrides: {parameters: {model: m.gguf}}
  files: [{filename: m.gguf, uri: "URL/f.gguf"}]
- name: whole-repository
  overrides: {backend: llama-cpp, parameters: {model: "hf:o/r"}}
- name: no-engine
  overrides: {backend: piper, parameters: {model: m.gguf}}
  files: [{filename: m.gguf, uri: "URL/f.gguf"}]
- name: wrong-digest
  overrides: {backend: llama-cpp, parameters: {model: m.gguf}}
  files: [{filename: m.gguf, uri: "huggingface://o/r/m-Q8_0.gguf", sha256: SHA}]
- name: escaping-file
  overrides: {backend: llama-cpp, parameters: {model: m.gguf}}
  files: [{filename: ../../m.gguf, uri: "URL/f.gguf"}]
"""
BASE = """
name: base
config_file: |
  backend: llama-cpp
  context_size: 4096
  template: {chat: base-chat}
prompt_templates: [{name: base-chat, content: "{{.Input}}"}]
"""
ESCAPED = 'config_file: |\n  backend: llama-cpp\n  stopwords: ["it\\\'s"]\n'


@pytest.fixture
async def shop(tmp_path: Path, sqlite_url: str) -> AsyncIterator[Shop]:
    async with hub() as sources:
        url = sources.server.url
        index = INDEX.replace("DIRECTORY", str(tmp_path)).replace("URL", url).replace("SHA", SHA256)
        (tmp_path / "index.yaml").write_text(index)
        (tmp_path / "base.yaml").write_text(BASE)
        (tmp_path / "escaped.yaml").write_text(ESCAPED)
        sources.server.files |= {"/f.gguf": MODEL, "/base.yaml": BASE.encode()}
        sources.add_repository("o/r", {"m-Q4_K_M.gguf": MODEL, "m-Q8_0.gguf": MODEL + b"8"})
        gallery = GallerySource(name="ours", url=f"file://{tmp_path}/index.yaml")
        async with site(tmp_path, sources=sources.sources, model_galleries=(gallery,)) as here:
            await here.ask("POST", "/api/nodes/old/approve", token=here.tokens["admin"])
            yield Shop(here, sources)


async def test_every_document_of_the_gallery_is_installed_or_says_why_not(shop: Shop) -> None:
    assert (await shop.refused("POST", "/models/apply", {"id": "inline"}))[1] == "gallery_loading"
    await shop.site.frontend.model_rows.catalogue.step()
    names = [one["name"] for one in await shop.good("GET", "/models/available")]
    installed, refused = {}, {}
    for name in names:
        answer = await shop.ask("POST", "/models/apply", {"id": name})
        if answer.status == 200:
            assert answer.json["uuid"] in answer.json["status"]
            installed[name] = await shop.good("GET", f"/api/models/{name}")
        else:
            refused[name] = answer.error["message"]
    assert set(installed) == {"by-url", "big", "inline", "escaped", "over-http", "whole-repository"}
    assert "no gallery has the backend 'piper'" in refused.pop("no-engine")
    assert "its sha256 is" in refused.pop("wrong-digest")
    assert "relative path" in refused.pop("escaping-file")
    assert refused == {}
    by_url = installed["by-url"]
    assert (by_url["license"], by_url["options"]["context_size"]) == ("apache-2.0", 100)
    assert by_url["config"]["template"] == {"chat": "{{.Input}}"}
    assert (by_url["files"][0]["name"], by_url["files"][0]["sha256"]) == ("m.gguf", SHA256)
    assert installed["escaped"]["config"]["stopwords"] == ["it's"]
    assert installed["over-http"]["options"]["context_size"] == 4096
    listed = {one["name"]: one for one in await shop.good("GET", "/models/available?term=chat model")}
    assert set(listed) == {"by-url"}
    assert (listed["by-url"]["installed"], listed["by-url"]["gallery"]["name"]) == (True, "ours")
    assert (await shop.good("GET", "/models/galleries"))[0]["entries"] == len(names)


async def test_a_variant_another_name_and_overrides(shop: Shop) -> None:
    await shop.site.frontend.model_rows.catalogue.step()
    body = {"id": "ours@by-url", "name": "mine", "variant": "big", "overrides": {"context_size": 7}}
    planned = await shop.good("POST", "/models/plan", body)
    assert (planned["is_stored"], planned["files"][0]["name"]) == (False, "big.gguf")
    assert await shop.names() == []
    applied = await shop.good("POST", "/models/apply", body)
    shown = await shop.good("GET", "/api/models/mine")
    assert shown["options"]["context_size"] == 7
    job = await shop.good("GET", f"/models/jobs/{applied['uuid']}")
    assert (job["gallery_element_name"], job["deletion"], job["processed"]) == ("mine", False, False)
    deleted = await shop.good("POST", "/models/delete/mine")
    assert (await shop.good("GET", f"/models/jobs/{deleted['uuid']}"))["deletion"] is True
    assert await shop.names() == []


async def test_built_in_models_and_addresses_can_be_applied_too(shop: Shop) -> None:
    await shop.site.frontend.model_rows.catalogue.step()
    await shop.good("POST", "/models/apply", {"id": "tiny-chat", "name": "toy"})
    assert (await shop.good("GET", "/api/models/toy"))["files"][0]["uri"].startswith("builtin:")
    url = f"{shop.hub.server.url}/base.yaml"
    files = [{"filename": "m.gguf", "uri": f"{shop.hub.server.url}/f.gguf", "sha256": SHA256}]
    body = {"url": url, "name": "far", "files": files, "overrides": {"parameters": {"model": "m.gguf"}}}
    await shop.good("POST", "/models/apply", body)
    await shop.good("POST", "/models/apply", {"url": "hf:o/r/m-Q8_0.gguf"})
    assert await shop.names() == ["far", "m-Q8_0", "toy"]
    assert (await shop.refused("POST", "/models/apply", {}))[1] == "unsupported"
    assert (await shop.refused("POST", "/models/apply", {"id": "gone"}))[0] == 404
    assert (await shop.refused("POST", "/models/apply", {"url": "file:///etc/x.yaml"}))[1] == "uri_not_allowed"
