"""Configurations in the form of LocalAI's model YAML: nothing harmless is refused, nothing unsafe is accepted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.core.errors import Invalid
from enginehouse.core.model_config import ModelConfig, TagPair, read_config

FULL: dict[str, Any] = {
    "name": "chatty",
    "backend": "llama-cpp",
    "context_size": 8192,
    "f16": True,
    "parameters": {"model": "chatty.gguf", "temperature": 0.2, "top_k": 10, "seed": 7, "logit_bias": {"15": -1}},
    "template": {"chat": "{{.Input}}", "join_chat_messages_by_character": "", "use_tokenizer_template": False},
    "roles": {"user": "USER:", "assistant": "BOT:"},
    "stopwords": ["</s>"],
    "function": {"grammar": {"parallel_calls": True}, "response_regex": ["(?P<name>\\w+)\\((?P<arguments>.*)\\)"]},
    "reasoning": {"tag_pairs": [{"start": "<a>", "end": "</a>"}]},
    "options": ["use_jinja:true", "parallel:2"],
    "limits": {"max_concurrent": 4},
    "known_usecases": ["chat"],
    "description": "text",
}


def test_a_configuration_is_read_without_warnings() -> None:
    config, warnings = read_config(FULL)
    assert warnings == []
    assert config.parameters.temperature == 0.2
    assert config.parameters.top_p == 0.95  # a default
    assert config.template.join_by == ""
    assert config.function.grammar.parallel_calls
    assert config.reasoning.tag_pairs == (TagPair(start="<a>", end="</a>"),)
    assert config.limits.max_concurrent == 4


def test_defaults_are_localais() -> None:
    config, warnings = read_config({"name": "m"})
    assert warnings == []
    assert config == ModelConfig(name="m")
    assert (config.parameters.temperature, config.parameters.top_p, config.parameters.seed) == (0.9, 0.95, -1)
    assert (config.mirostat, config.mirostat_tau, config.mirostat_eta) == (0, 5.0, 0.1)
    assert config.prompt_cache_all
    assert config.context_size is None


@pytest.mark.parametrize(
    ("mapping", "key"),
    [
        ({"contextsize": 1}, "`contextsize`"),
        ({"context_size": "many"}, "`context_size`"),
        ({"parameters": {"temprature": 1}}, "`parameters.temprature`"),
        ({"parameters": "hot"}, "`parameters`"),
        ({"function": {"grammar": {"parallel_calls": "perhaps"}}}, "`function.grammar.parallel_calls`"),
        ({"stopwords": {"a": 1}}, "`stopwords`"),
        ({"mcp": {}}, "`mcp`"),
        ({"cutstrings": ["(unclosed"]}, "`cutstrings`"),
        ({"function": {"response_regex": ["(?P<a"]}}, "`function.response_regex`"),
        ({"function": {"replace_llm_results": [{"key": "(", "value": ""}]}}, "`function.replace_llm_results`"),
        ({"template": {"chat": "{{define `x`}}"}}, "`template.chat`"),
        ({5: "five"}, "`5`"),
    ],
)
def test_a_key_that_cannot_be_used_is_a_warning_that_names_it(mapping: dict[str, Any], key: str) -> None:
    config, warnings = read_config({"name": "m", **mapping})
    assert len(warnings) == 1
    assert key in warnings[0]
    assert config.cutstrings == ()
    assert config.function.response_regex == ()


def test_values_are_read_as_a_reader_for_go_does() -> None:
    config, warnings = read_config(
        {
            "name": "m",
            "quantization": 4,
            "main_gpu": 0,
            "flash_attention": True,
            "options": ["a:b", 5],
            "stopwords": "x",
        }
        | {"gpu_layers": "33", "mmap": "false", "rope_freq_base": 10000, "mmproj": None}
    )
    assert warnings == []
    assert (config.quantization, config.main_gpu, config.flash_attention) == ("4", "0", "on")
    assert config.options == ("a:b", "5")
    assert config.stopwords == ("x",)
    assert (config.gpu_layers, config.mmap, config.rope_freq_base) == (33, False, 10000.0)


@pytest.mark.parametrize(
    "mapping",
    [
        {},
        {"name": 5},
        {"name": ""},
        {"name": "a\nb"},
        {"name": "m", "backend": "../bin/sh"},
        {"name": "m", "backend": "a b"},
        {"name": "m", "parameters": {"model": "/etc/passwd"}},
        {"name": "m", "parameters": {"model": "a/../../b"}},
        {"name": "m", "parameters": {"model": "..\\b"}},
        {"name": "m", "parameters": {"model": "C:\\b"}},
        {"name": "m", "mmproj": "../x"},
        {"name": "m", "draft_model": "/x"},
        {"name": "m", "lora_adapters": ["ok", "~/x"]},
    ],
)
def test_names_and_paths_that_lead_elsewhere_are_refused(mapping: dict[str, Any]) -> None:
    with pytest.raises(Invalid) as caught:
        read_config(mapping)
    assert caught.value.code == "invalid_name"
    assert caught.value.message.startswith("cannot use")


@pytest.mark.parametrize(
    "model", ["dir/file..gguf", "org/repo", "huggingface://a/b/c.gguf", "https://example.com/a/../b"]
)
def test_ordinary_names_of_files_and_addresses_are_accepted(model: str) -> None:
    assert read_config({"name": "m", "parameters": {"model": model}})[0].parameters.model == model


_TEXT = st.text("ab{}./(", max_size=5)
_ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), _TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_TEXT, inner, max_size=3)),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*ModelConfig.__struct_fields__, "x"]), _ANY, max_size=6))
def test_any_mapping_with_a_name_is_read_or_refused_as_invalid(mapping: dict[str, Any]) -> None:
    try:
        config, warnings = read_config({**mapping, "name": "m"})
    except Invalid:
        return
    assert config.name == "m"
    assert all("`" in warning for warning in warnings)
