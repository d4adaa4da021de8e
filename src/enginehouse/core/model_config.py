"""A model's configuration: the typed view of a mapping in the form of LocalAI's model YAML.

The stored mapping is the truth and keeps every key; this view has the keys that texts, embeddings and reranking use.
A key that is unknown or has the wrong type never makes a model unusable: its default applies and a warning names it.
Only what would be unsafe or meaningless is refused: names, and paths that leave the directory of models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

from enginehouse.core import go_template
from enginehouse.core.errors import Invalid
from enginehouse.core.name import check_model_name, shown

S = TypeVar("S", bound=Struct)

_BACKEND = re.compile(r"[A-Za-z0-9_-]+")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# Keys of LocalAI that describe a model or belong to files and galleries: read elsewhere or shown to people only.
_DESCRIPTIVE = frozenset(
    re.findall(
        r"\w+",
        "description usage license icon urls tags download_files artifacts known_usecases feature_flags grpc diffusers "
        "tts step cuda",
    )
)
# Keys of LocalAI that change what a request does there and nothing here. People must know.
_WITHOUT_EFFECT = frozenset(["mcp", "agent", "pipeline", "router", "pii", "proxy", "compression"])


class Sampling(Struct, frozen=True, kw_only=True):
    """`parameters`: defaults of requests. None means that the engine's family decides."""

    model: str = ""
    temperature: float = 0.9
    top_p: float = 0.95
    top_k: int | None = None
    min_p: float = 0.0
    typical_p: float = 1.0
    tail_free_z: float = field(name="tfz", default=1.0)
    max_tokens: int = 0
    seed: int = -1
    n: int = 1
    n_keep: int = 0
    batch: int = 0
    repeat_penalty: float = 0.0
    repeat_last_n: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: bool = False
    echo: bool = False
    logprobs: bool | int = False
    top_logprobs: int = 0
    logit_bias: dict[str, float] = {}
    negative_prompt: str = ""
    negative_prompt_scale: float = 0.0
    pooling: str = ""
    pooling_half_life_tokens: int = 256
    encoding_format: str = ""


class TemplateConfig(Struct, frozen=True, kw_only=True):
    """`template`: Go templates, inline or by the name of a file."""

    chat: str = ""
    chat_message: str = ""
    completion: str = ""
    edit: str = ""
    function: str = ""
    multimodal: str = ""
    reply_prefix: str = ""
    join_by: str | None = field(name="join_chat_messages_by_character", default=None)
    use_tokenizer_template: bool = False


class ToolGrammarConfig(Struct, frozen=True, kw_only=True):
    """`function.grammar`: how a grammar for tool calls is made."""

    disable: bool = False
    parallel_calls: bool = False
    mixed_mode: bool = False
    no_mixed_free_string: bool = False
    prefix: str = ""
    expect_strings_after_json: bool = False
    properties_order: str = ""
    schema_type: str = ""
    triggers: tuple[dict[str, str], ...] = ()
    disable_parallel_new_lines: bool = False


class Replacement(Struct, frozen=True, kw_only=True):
    """A regular expression and what replaces its matches."""

    key: str = ""
    value: str = ""


class ToolConfig(Struct, frozen=True, kw_only=True):
    """`function`: how tool calls are asked for and found in text."""

    grammar: ToolGrammarConfig = ToolGrammarConfig()
    disable_no_action: bool = False
    no_action_function_name: str = ""
    no_action_description_name: str = ""
    function_name_key: str = ""
    function_arguments_key: str = ""
    response_regex: tuple[str, ...] = ()
    json_regex_match: tuple[str, ...] = ()
    argument_regex: tuple[str, ...] = ()
    replace_llm_results: tuple[Replacement, ...] = ()
    replace_function_results: tuple[Replacement, ...] = ()
    capture_llm_results: tuple[str, ...] = ()
    xml_format_preset: str = ""
    xml_format: dict[str, Any] = {}
    automatic_tool_parsing_fallback: bool = False
    disable_peg_parser: bool = False


class TagPair(Struct, frozen=True, kw_only=True):
    start: str = ""
    end: str = ""


class ReasoningConfig(Struct, frozen=True, kw_only=True):
    """`reasoning`: whether a model thinks first, and how its thoughts are marked in text."""

    disable: bool | None = None
    disable_reasoning_tag_prefill: bool = False
    strip_reasoning_only: bool = False
    thinking_start_tokens: tuple[str, ...] = ()
    tag_pairs: tuple[TagPair, ...] = ()


class AdmissionConfig(Struct, frozen=True, kw_only=True):
    """`limits`: requests at the same time; 0 is no limit."""

    max_concurrent: int = 0
    retry_after_seconds: float = 1


class MediaLimits(Struct, frozen=True, kw_only=True):
    image: int = 0
    video: int = 0
    audio: int = 0


class ModelConfig(Struct, frozen=True, kw_only=True):
    """One model. Defaults are LocalAI's; None is a default that depends on the backend or the machine."""

    name: str
    backend: str = ""
    alias: str = ""
    parameters: Sampling = Sampling()
    template: TemplateConfig = TemplateConfig()
    function: ToolConfig = ToolConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    limits: AdmissionConfig = AdmissionConfig()
    roles: dict[str, str] = {}
    reasoning_effort: str = ""
    chat_template_kwargs: dict[str, Any] = {}
    system_prompt: str = ""
    grammar: str = ""
    stopwords: tuple[str, ...] = ()
    cutstrings: tuple[str, ...] = ()
    extract_regex: tuple[str, ...] = ()
    trimspace: tuple[str, ...] = ()
    trimsuffix: tuple[str, ...] = ()
    disabled: bool = False
    pinned: bool = False
    concurrency_groups: tuple[str, ...] = ()
    context_size: int | None = None
    threads: int | None = None
    f16: bool | None = None
    debug: bool | None = None
    embeddings: bool = False
    reranking: bool = False
    gpu_layers: int | None = None
    mmap: bool | None = None
    mmlock: bool = False
    low_vram: bool = False
    numa: bool = False
    flash_attention: str = "auto"
    cache_type_k: str = ""
    cache_type_v: str = ""
    no_kv_offloading: bool = False
    tensor_split: str = ""
    main_gpu: str = ""
    rope_scaling: str = ""
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    yarn_ext_factor: float = 0.0
    yarn_attn_factor: float = 0.0
    yarn_beta_fast: float = 0.0
    yarn_beta_slow: float = 0.0
    ngqa: int = 0
    rms_norm_eps: float = 0.0
    lora_adapter: str = ""
    lora_base: str = ""
    lora_scale: float = 0.0
    lora_adapters: tuple[str, ...] = ()
    lora_scales: tuple[float, ...] = ()
    draft_model: str = ""
    n_draft: int = 0
    mmproj: str = ""
    prompt_cache_path: str = ""
    prompt_cache_all: bool = True
    prompt_cache_ro: bool = False
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    options: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    engine_args: dict[str, Any] = {}
    type: str = ""
    quantization: str = ""
    load_format: str = ""
    dtype: str = ""
    trust_remote_code: bool = False
    gpu_memory_utilization: float = 0.0
    max_model_len: int = 0
    tensor_parallel_size: int = 0
    enforce_eager: bool = False
    swap_space: int = 0
    disable_log_stats: bool = False
    limit_mm_per_prompt: MediaLimits = MediaLimits()


def read_config(mapping: Mapping[str, Any]) -> tuple[ModelConfig, list[str]]:
    """The view of a mapping, and warnings about keys that it cannot use."""
    name = mapping.get("name")
    if not isinstance(name, str):
        raise Invalid("cannot use the model's configuration: it has no `name`", code="invalid_name", param="name")
    check_model_name(name)
    warnings: list[str] = []
    config = _read(mapping, ModelConfig, "", warnings)
    _check(config)
    config = _without_broken_patterns(config, warnings)
    for one in ("chat", "chat_message", "completion", "edit", "function"):
        try:
            go_template.check(getattr(config.template, one))
        except Invalid as error:
            # Kept: a request that needs it is refused with the same reason.
            warnings.append(f"`template.{one}`: {error.message}")
    if config.template.multimodal:
        warnings.append("`template.multimodal` has no effect: media are marked as the engine wants it")
    if config.function.xml_format:
        warnings.append("`function.xml_format` has no effect: the formats of known model families are found without it")
    if config.alias and set(mapping) - {"name", "alias", "description"}:
        warnings.append("`alias` redirects to another model: the other keys have no effect")
    return config, warnings


def _read(mapping: Mapping[str, Any], kind: type[S], path: str, warnings: list[str]) -> S:
    values: dict[str, object] = {}
    known = {one.encode_name: one for one in msgspec.structs.fields(kind)}
    for key, value in mapping.items():
        where = f"{path}{key}"
        one = known.get(key) if isinstance(key, str) else None
        if one is None:
            _warn_of_unknown(str(key), path, warnings)
        elif value is None:
            continue  # a key without a value is as good as absent
        elif isinstance(one.type, type) and issubclass(one.type, Struct):
            if isinstance(value, Mapping):
                values[one.name] = _read(value, one.type, f"{where}.", warnings)
            else:
                warnings.append(f"`{where}` has no effect: it must be a mapping")
        else:
            try:
                values[one.name] = msgspec.convert(_as_text(value, one.type, str(key)), one.type, strict=False)
            except msgspec.ValidationError as error:
                warnings.append(f"`{where}` has no effect, its default applies: {error}")
    return kind(**values)


def _warn_of_unknown(key: str, path: str, warnings: list[str]) -> None:
    if path or key not in _DESCRIPTIVE | _WITHOUT_EFFECT:
        warnings.append(f"`{path}{key}` has no effect: it is not a known key")
    elif key in _WITHOUT_EFFECT:
        warnings.append(f"`{key}` has no effect: this part of LocalAI is not supported")


def _as_text(value: object, kind: object, key: str) -> object:
    """Numbers and booleans where text belongs, as a YAML reader for Go takes them."""
    if kind == tuple[str, ...]:
        if isinstance(value, str):
            return (value,)
        return tuple(_as_text(one, str, key) for one in value) if isinstance(value, list | tuple) else value
    if kind not in (str, str | None) or not isinstance(value, bool | int | float):
        return value
    if isinstance(value, bool):
        # YAML 1.1 reads `on` and `off` as booleans, and these are the words that engines know.
        true, false = ("on", "off") if key == "flash_attention" else ("true", "false")
        return true if value else false
    return str(value)


def _without_broken_patterns(config: ModelConfig, warnings: list[str]) -> ModelConfig:
    """Regular expressions are written for Go. One that Python cannot read must not fail requests."""

    def usable(pattern: str, key: str) -> bool:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            warnings.append(f"`{key}` has no effect for {shown(pattern)}: {error}")
            return False
        return True

    def kept(patterns: tuple[str, ...], key: str) -> tuple[str, ...]:
        return tuple(one for one in patterns if usable(one, key))

    tools = config.function
    checked = {
        key: kept(getattr(tools, key), f"function.{key}")
        for key in ("response_regex", "json_regex_match", "argument_regex", "capture_llm_results")
    }
    replacements = {
        key: tuple(one for one in getattr(tools, key) if usable(one.key, f"function.{key}"))
        for key in ("replace_llm_results", "replace_function_results")
    }
    return msgspec.structs.replace(
        config,
        cutstrings=kept(config.cutstrings, "cutstrings"),
        extract_regex=kept(config.extract_regex, "extract_regex"),
        function=msgspec.structs.replace(tools, **checked, **replacements),
    )


def _check(config: ModelConfig) -> None:
    if config.backend and not _BACKEND.fullmatch(config.backend):
        raise Invalid(
            f"cannot use {shown(config.backend)} as a backend: use letters, digits, '-' and '_'",
            code="invalid_name",
            param="backend",
        )
    if config.alias:
        check_model_name(config.alias)
    for key, value in (
        ("parameters.model", config.parameters.model),
        ("mmproj", config.mmproj),
        ("draft_model", config.draft_model),
        ("prompt_cache_path", config.prompt_cache_path),
        ("lora_adapter", config.lora_adapter),
        ("lora_base", config.lora_base),
        *(("lora_adapters", one) for one in config.lora_adapters),
    ):
        check_relative(key, value)


def check_relative(key: str, value: str) -> None:
    """Refuse a path that could leave the directory of models. A URL is no path; its fetcher has its own rules."""
    if _SCHEME.match(value):
        return
    parts = value.replace("\\", "/").split("/")
    is_drive = len(value) > 1 and value[1] == ":" and value[0].isalpha()
    if value.startswith(("/", "\\", "~")) or is_drive or ".." in parts or "\x00" in value:
        raise Invalid(
            f"cannot use {shown(value)} as `{key}`: it must be a relative path without '..'",
            code="invalid_name",
            param=key,
        )
