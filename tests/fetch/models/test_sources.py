"""Sources of models, asked of servers that answer as the real ones do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator

import pytest
from tests.core.gguf_files import LLAMA, TENSORS, gguf
from tests.fetch.faults import Answer, IgnoreRange, Redirect
from tests.fetch.faulty import faulty
from tests.fetch.models.hub import COMMIT, Hub, hub

from enginehouse.core.errors import Denied, EnginehouseError, Invalid, NotFound, Upstream
from enginehouse.core.gguf import PREFIX_BYTES
from enginehouse.fetch.models.credentials import ModelCredentials
from enginehouse.fetch.models.huggingface import Wishes

MODEL = gguf(LLAMA, TENSORS) + bytes(1000)
SHA256 = hashlib.sha256(MODEL).hexdigest()
ANY = Wishes()


@pytest.fixture
async def here() -> AsyncIterator[Hub]:
    async with hub() as made:
        yield made


async def refusal(here: Hub, text: str, wishes: Wishes = ANY) -> EnginehouseError:
    with pytest.raises(EnginehouseError) as caught:
        await here.sources.find(text, wishes)
    assert caught.value.message.startswith("cannot ")
    return caught.value


async def test_a_repository_is_pinned_and_its_middle_chosen(here: Hub) -> None:
    files = {"m-Q8_0.gguf": MODEL + b"8", "sub/m-Q4_K_M.gguf": MODEL, "mmproj-m-f16.gguf": b"GGUF", "README.md": b"x"}
    here.add_repository("o/r", files, cardData={"license": "apache-2.0"})
    found = await here.sources.find("hf:o/r", Wishes(memory_bytes=(64 * 1024**3,)))
    model, projector = found.files
    assert (model.name, model.sha256, model.size_bytes) == ("m-Q4_K_M.gguf", SHA256, len(MODEL))
    assert model.uri == f"{here.server.url}/o/r/resolve/{COMMIT}/sub/m-Q4_K_M.gguf"
    assert projector.name == "mmproj-m-f16.gguf"
    assert found.config == {"parameters": {"model": "m-Q4_K_M.gguf"}, "mmproj": "mmproj-m-f16.gguf"}
    assert found.license == "apache-2.0"
    assert found.header is not None
    assert found.header.architecture == "llama"
    assert "Q8_0" in found.remarks[0]
    assert found.warnings == ()


async def test_one_file_of_a_revision_and_a_quantisation_by_name(here: Hub) -> None:
    here.add_repository("o/r", {"a-Q8_0.gguf": MODEL, "b-Q4_K_M.gguf": MODEL}, revision="v1")
    assert (await here.sources.find("hf://o/r/a-Q8_0.gguf@v1", ANY)).files[0].name == "a-Q8_0.gguf"
    assert (await here.sources.find("hf:o/r:q8_0@v1", ANY)).files[0].name == "a-Q8_0.gguf"
    error = await refusal(here, "hf:o/r:Q2_K@v1")
    assert "it has Q8_0, Q4_K_M" in error.message or "it has Q4_K_M, Q8_0" in error.message
    assert isinstance(await refusal(here, "hf:o/r/none.gguf@v1"), NotFound)
    assert isinstance(await refusal(here, "hf:o/r@gone"), NotFound)


async def test_weights_as_safetensors_are_a_directory(here: Hub) -> None:
    files = {"model.safetensors": b"w", "config.json": b"{}", "sub/vocab.txt": b"v", "pytorch_model.bin": b"p"}
    here.add_repository("o/r", files, pipeline_tag="feature-extraction")
    found = await here.sources.find("hf:o/r", ANY)
    assert [file.name for file in found.files] == ["config.json", "model.safetensors", "sub/vocab.txt"]
    assert found.files[0].sha256 == ""
    assert found.is_directory
    assert found.config == {"parameters": {"model": "o/r"}, "embeddings": True}
    only = await here.sources.find("hf:o/r", Wishes(allow=("*.bin",)))
    assert [file.name for file in only.files] == ["pytorch_model.bin"]


async def test_a_repository_without_a_usable_file_is_refused(here: Hub) -> None:
    here.add_repository("o/r", {"README.md": b"x", "x.onnx": b"y"})
    error = await refusal(here, "hf:o/r")
    assert isinstance(error, Invalid)
    assert "hf:o/r/FILE" in error.message


@pytest.mark.parametrize("status", [401, 403])
async def test_a_gated_repository_says_which_credential_to_set(here: Hub, status: int) -> None:
    here.server.plan(Answer(status), path="/api/models", times=None)
    error = await refusal(here, "hf:o/r")
    assert isinstance(error, Denied)
    assert "HF_TOKEN" in error.message
    error = await refusal(here, "hf:o/r", Wishes(credential="mine"))
    assert "cannot find the credential 'mine'" in error.message


@pytest.mark.parametrize("status", [401, 403])
async def test_a_file_that_needs_a_credential_says_so(status: int) -> None:
    async with hub({"mine": "s3cret"}) as here:
        here.server.plan(Answer(status), path="/m.gguf", times=None)
        error = await refusal(here, f"{here.server.url}/m.gguf")
        assert (isinstance(error, Denied), "--model-credentials" in error.message) == (True, True)
        error = await refusal(here, f"{here.server.url}/m.gguf", Wishes(credential="mine"))
        assert "check that the credential 'mine' is valid" in error.message
        assert here.server.requests[-1].headers["authorization"] == "Bearer s3cret"


async def test_a_token_goes_to_the_hub_and_not_to_where_it_redirects() -> None:
    async with hub({"HF_TOKEN": "s3cret"}) as here, faulty("") as elsewhere:
        here.add_repository("o/r", {"m.gguf": MODEL})
        elsewhere.files["/blob"] = MODEL
        here.server.plan(Redirect(f"{elsewhere.url.replace('127.0.0.1', 'localhost')}/blob"), path="/resolve/")
        error = await refusal(here, "hf:o/r")
        assert error.code == "uri_not_allowed"
        here.server.plan(Redirect(f"{elsewhere.url}/blob"), path="/resolve/")
        found = await here.sources.find("hf:o/r", ANY)
        assert found.files[0].credential == "HF_TOKEN"
        assert here.server.requests[0].headers["authorization"] == "Bearer s3cret"
        assert "authorization" not in elsewhere.requests[0].headers
        assert "s3cret" not in repr(found) + repr(ModelCredentials({"a": "s3cret"}, {}))


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"sha": "main"}', b'{"sha": 1}'])
async def test_an_answer_of_the_hub_that_makes_no_sense_is_refused(here: Hub, body: bytes) -> None:
    here.server.files["/api/models/o/r/revision/main"] = body
    assert (await refusal(here, "hf:o/r")).code == "unsupported"


async def test_a_name_in_a_repository_never_leaves_its_directory(here: Hub) -> None:
    here.add_repository("o/r", {"../../evil.safetensors": b"x"})
    assert (await refusal(here, "hf:o/r")).code in ("invalid_name", "unsupported")


async def test_a_file_on_the_web_is_known_by_its_first_bytes(here: Hub) -> None:
    here.server.files["/dir/m.gguf"] = MODEL + bytes(PREFIX_BYTES)
    found = await here.sources.find(f"{here.server.url}/dir/m.gguf?download=true", ANY)
    assert found.files[0].name == "m.gguf"
    assert found.files[0].size_bytes == len(MODEL) + PREFIX_BYTES
    assert found.header is not None
    assert found.header.name == "Tiny"
    assert "no digest" in found.warnings[0]
    here.server.plan(IgnoreRange())
    assert (await here.sources.find(f"{here.server.url}/dir/m.gguf", ANY)).files == (
        (await here.sources.find(f"{here.server.url}/dir/m.gguf", ANY)).files
    )
    assert here.server.bytes_sent() < 4 * PREFIX_BYTES + 200_000


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"<!DOCTYPE html><p>sign in", "web page"),
        (MODEL[:100], "cut off"),
        (b"GGUF", "cut off"),
        (b"other bytes", "does not begin like one"),
        (b"", "is empty"),
    ],
)
async def test_a_file_that_is_no_model_is_refused(here: Hub, content: bytes, why: str) -> None:
    here.server.files["/m.gguf"] = content
    if not content:
        here.server.plan(Answer(416))
    assert why in (await refusal(here, f"{here.server.url}/m.gguf")).message


async def test_an_unknown_architecture_is_a_warning_and_an_embedding_model_is_marked(here: Hub) -> None:
    here.server.files["/q.gguf"] = gguf({"general.architecture": "quokka"})
    assert any("quokka" in one for one in (await here.sources.find(f"{here.server.url}/q.gguf", ANY)).warnings)
    here.server.files["/b.gguf"] = gguf({"general.architecture": "bert"})
    assert (await here.sources.find(f"{here.server.url}/b.gguf", ANY)).config["embeddings"] is True


async def test_addresses_that_are_not_public_are_refused_unless_allowed(here: Hub) -> None:
    for text in ("http://10.0.0.1/m.gguf", "http://169.254.169.254/m.gguf", "http://[::1]/m.gguf"):
        assert (await refusal(here, text)).code == "uri_not_allowed"


async def test_ollama_layers_by_their_media_types(here: Hub) -> None:
    kind = "application/vnd.ollama.image."
    parameters = json.dumps({"temperature": 0.5, "stop": ["<x>"], "num_ctx": 8192, "num_gpu": 3}).encode()
    here.add_manifest(
        "library/gemma",
        "2b",
        [
            (f"{kind}model", MODEL, {}),
            (f"{kind}projector", b"p", {}),
            (f"{kind}template", b"{{ .Prompt }}", {}),
            (f"{kind}params", parameters, {}),
            (f"{kind}license", b"\nGemma Terms of Use\nmore", {}),
            (f"{kind}system", b"be kind", {}),
        ],
    )
    found = await here.sources.find("ollama://gemma:2b", ANY)
    assert [file.name for file in found.files] == ["gemma-2b.gguf", "gemma-2b-projector.gguf"]
    assert found.files[0].uri == f"ollama://{here.server.address}/library/gemma@sha256:{SHA256}"
    assert (found.files[0].sha256, found.files[0].size_bytes) == (SHA256, len(MODEL))
    assert found.license == "Gemma Terms of Use"
    assert found.config == {
        "parameters": {"model": "gemma-2b.gguf", "temperature": 0.5},
        "mmproj": "gemma-2b-projector.gguf",
        "context_size": 8192,
        "stopwords": ["<x>"],
        "system_prompt": "be kind",
    }
    assert "template" in found.warnings[0]
    here.add_manifest("library/empty", "latest", [(f"{kind}license", b"x", {})])
    assert "has no model" in (await refusal(here, "ollama://empty")).message
    assert isinstance(await refusal(here, "ollama://gone"), NotFound)


async def test_files_of_an_artifact_by_their_titles(here: Hub) -> None:
    title = "org.opencontainers.image.title"
    kind = "application/vnd.oci.image.manifest.v1+json"
    layers = [("application/x", b"readme", {title: "README"}), ("application/x", MODEL, {title: "m.gguf"})]
    here.add_manifest("a/b", "1", layers, kind)
    found = await here.sources.find(f"oci://{here.server.address}/a/b:1", ANY)
    assert [file.name for file in found.files] == ["m.gguf", "README"]
    assert found.files[0].uri == f"oci://{here.server.address}/a/b@sha256:{SHA256}"
    here.add_manifest("a/c", "1", [("application/vnd.oci.image.layer.v1.tar+gzip", b"x", {})], kind)
    assert "none of its layers" in (await refusal(here, f"oci://{here.server.address}/a/c:1")).message
    here.add_manifest("a/d", "1", [("application/x", b"x", {title: "../../evil"})], kind)
    assert (await refusal(here, f"oci://{here.server.address}/a/d:1")).code == "invalid_name"


async def test_a_server_that_fails_is_an_error_that_can_heal(here: Hub) -> None:
    here.server.plan(Answer(503), times=None)
    assert isinstance(await refusal(here, "hf:o/r"), Upstream)
    assert isinstance(await refusal(here, f"{here.server.url}/m.gguf"), Upstream)
