"""The options of a load, compared field by field with what LocalAI sends."""

from __future__ import annotations

import json
from typing import Any

from enginehouse.core.load_options import ModelPaths, model_options, uses_tokenizer_template
from enginehouse.core.model_config import read_config

PATHS = ModelPaths(directory="/models", threads=2)


def _options(mapping: dict[str, Any], paths: ModelPaths = PATHS) -> dict[str, Any]:
    return model_options(read_config({"name": "m", **mapping})[0], paths)


def test_a_plain_model_gets_the_defaults() -> None:
    assert _options({"backend": "llama-cpp", "parameters": {"model": "sub/m.gguf"}}) == {
        "Model": "sub/m.gguf",
        "ModelFile": "/models/sub/m.gguf",
        "ModelPath": "/models",
        "ContextSize": 4096,
        "Seed": -1,
        "NBatch": 512,
        "NGPULayers": 99999999,
        "Threads": 2,
        "MMap": True,
        "FlashAttention": "auto",
        "Options": ["cache_reuse:256", "use_jinja:true"],
    }


def test_the_identity_is_not_the_path() -> None:
    options = _options(
        {"parameters": {"model": "m.gguf"}}, ModelPaths(directory="/w", model_file="/w/.snap/abc/m.gguf")
    )
    assert options["Model"] == "m.gguf"
    assert options["ModelFile"] == "/w/.snap/abc/m.gguf"


def test_configured_options_win_over_defaults() -> None:
    options = _options(
        {
            "options": ["n_cache_reuse:0", "jinja:false"],
            "threads": 8,
            "context_size": 100,
            "gpu_layers": 0,
            "mmap": False,
        }
    )
    assert options["Options"] == ["n_cache_reuse:0", "jinja:false"]
    assert options["Threads"] == 8
    assert options["ContextSize"] == 100
    assert "NGPULayers" not in options  # 0 is what an absent number means
    assert "MMap" not in options


def test_what_suits_the_machine_is_used_where_the_configuration_says_nothing() -> None:
    machine = ModelPaths(directory="/models", gpu_layers=20, parallel=4)
    plain = _options({"backend": "llama-cpp"}, machine)
    assert (plain["NGPULayers"], plain["Options"][-1]) == (20, "parallel:4")
    said = _options({"backend": "llama-cpp", "gpu_layers": 7, "options": ["n_parallel:2"]}, machine)
    assert (said["NGPULayers"], "parallel:4" in said["Options"]) == (7, False)
    none = _options({}, ModelPaths(directory="/models", gpu_layers=0))
    assert "NGPULayers" not in none
    other = _options({"backend": "vllm"}, machine)
    assert "Options" not in other, "an option of llama.cpp"


def test_companion_files_are_joined_and_adapters_are_not() -> None:
    options = _options({"mmproj": "p.gguf", "draft_model": "d.gguf", "lora_adapter": "l.gguf", "lora_scales": [0.5]})
    assert options["MMProj"] == "/models/p.gguf"
    assert options["DraftModel"] == "/models/d.gguf"
    assert options["LoraAdapter"] == "l.gguf"
    assert options["LoraScales"] == [0.5]


def test_an_embedding_model_takes_its_whole_context_in_one_batch() -> None:
    assert _options({"embeddings": True, "context_size": 8192})["NBatch"] == 8192
    assert _options({"reranking": True})["NBatch"] == 4096
    assert _options({"embeddings": True, "parameters": {"batch": 64}})["NBatch"] == 64


def test_intel_builds_do_not_map_files() -> None:
    assert "MMap" not in _options({"backend": "intel-sycl-f16-llama-cpp", "mmap": True})
    assert _options({"backend": "cuda12-llama-cpp"})["MMap"] is True


def test_vllm_gets_its_arguments_as_json() -> None:
    options = _options({"backend": "vllm", "engine_args": {"enable_prefix_caching": False, "x": [1]}})
    assert json.loads(options["EngineArgs"]) == {
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "x": [1],
    }
    assert "Options" not in options


def test_triggers_of_grammars_are_messages() -> None:
    options = _options({"function": {"grammar": {"triggers": [{"word": "<tool_call>"}, {"other": "x"}]}}})
    assert options["GrammarTriggers"] == [{"word": "<tool_call>"}]


def test_the_tokenizers_template_is_used_where_nothing_is_configured() -> None:
    assert uses_tokenizer_template(read_config({"name": "m"})[0])
    assert uses_tokenizer_template(read_config({"name": "m", "template": {"completion": "{{.Input}}"}})[0])
    assert not uses_tokenizer_template(read_config({"name": "m", "template": {"chat": "{{.Input}}"}})[0])
    assert not uses_tokenizer_template(read_config({"name": "m", "roles": {"user": "U:"}})[0])
    both = {"chat": "{{.Input}}", "use_tokenizer_template": True}
    assert uses_tokenizer_template(read_config({"name": "m", "template": both})[0])
