"""What an engine is told when it loads a model: the fields of LocalAI's `ModelOptions`, as a plain mapping.

Pure. The caller turns the mapping into the message. `Model` is the model's identity: it stays as the configuration has
it, wherever the files are, because every later request is checked against it.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

import msgspec
from msgspec import Struct

from enginehouse.core.model_config import ModelConfig

ALL_LAYERS = 99999999
CONTEXT_SIZE = 4096
BATCH = 512
THREADS = 4
_NO_MMAP = re.compile(r"(?:^|[-_])(?:intel|sycl)(?:[-_]|$)")


class ModelPaths(Struct, frozen=True, kw_only=True):
    """Where a model is on the machine of its engine. All paths are absolute."""

    directory: str
    model_file: str = ""  # where it is not the name in the configuration below the directory
    threads: int = 0  # the worker's share of cores, for a configuration that names no number
    context_size: int = 0  # what the model's file recommends, if it is known
    batch: int = 0  # what the machine recommends, if it is known
    gpu_layers: int | None = None  # what fits on the machine's cards, if it is known
    parallel: int = 0  # requests at once that suit the machine's cards, if it is known


def is_llama(backend: str) -> bool:
    """Whether a backend runs GGUF files with llama.cpp; an unnamed backend does."""
    return not backend or "llama-cpp" in backend


def is_mlx(backend: str) -> bool:
    return backend in ("mlx", "mlx-vlm", "mlx-distributed")


def uses_tokenizer_template(config: ModelConfig) -> bool:
    """Whether the engine renders chats itself: by configuration, or because nothing else is configured."""
    template = config.template
    configured = template.chat or template.chat_message or template.function or config.roles
    return template.use_tokenizer_template or not configured


def model_options(config: ModelConfig, paths: ModelPaths) -> dict[str, Any]:
    """The fields by the names of the message. Zero values are left out: they are the message's own defaults."""
    parameters = config.parameters
    context = config.context_size or paths.context_size or CONTEXT_SIZE
    is_batched_whole = config.embeddings or config.reranking
    fields: dict[str, Any] = {
        "Model": parameters.model,
        "ModelFile": paths.model_file or _below(paths.directory, parameters.model),
        "ModelPath": paths.directory,
        "MMProj": _below(paths.directory, config.mmproj),
        "DraftModel": _below(paths.directory, config.draft_model),
        "ContextSize": context,
        "Seed": parameters.seed,
        # An embedding needs its whole input in one batch.
        "NBatch": parameters.batch or paths.batch or (max(context, BATCH) if is_batched_whole else BATCH),
        "NGPULayers": next((one for one in (config.gpu_layers, paths.gpu_layers) if one is not None), ALL_LAYERS),
        "Threads": config.threads or paths.threads or THREADS,
        "F16Memory": bool(config.f16),
        "MLock": config.mmlock,
        "MMap": _maps(config),
        "LowVRAM": config.low_vram,
        "NUMA": config.numa,
        "Embeddings": config.embeddings,
        "Reranking": config.reranking,
        "MainGPU": config.main_gpu,
        "TensorSplit": config.tensor_split,
        "FlashAttention": config.flash_attention,
        "NoKVOffload": config.no_kv_offloading,
        "CacheTypeKey": config.cache_type_k,
        "CacheTypeValue": config.cache_type_v,
        "LimitImagePerPrompt": config.limit_mm_per_prompt.image,
        "LimitVideoPerPrompt": config.limit_mm_per_prompt.video,
        "LimitAudioPerPrompt": config.limit_mm_per_prompt.audio,
        "GrammarTriggers": [{"word": one["word"]} for one in config.function.grammar.triggers if one.get("word")],
        "Options": _options(config, paths.parallel),
        "Overrides": list(config.overrides),
        "EngineArgs": _engine_args(config),
        **_positions(config),
        **_adapters(config),
        **_python_engines(config),
    }
    return {name: value for name, value in fields.items() if value not in (0, "", False, []) or name == "Seed"}


def _below(directory: str, name: str) -> str:
    return posixpath.join(directory, name) if name else ""


def _maps(config: ModelConfig) -> bool:
    if _NO_MMAP.search(config.backend):
        return False  # mapped files crash Intel's runtime
    return config.mmap is not False


def _positions(config: ModelConfig) -> dict[str, Any]:
    return {
        "RopeScaling": config.rope_scaling,
        "RopeFreqBase": config.rope_freq_base,
        "RopeFreqScale": config.rope_freq_scale,
        "YarnExtFactor": config.yarn_ext_factor,
        "YarnAttnFactor": config.yarn_attn_factor,
        "YarnBetaFast": config.yarn_beta_fast,
        "YarnBetaSlow": config.yarn_beta_slow,
        "NGQA": config.ngqa,
        "RMSNormEps": config.rms_norm_eps,
    }


def _adapters(config: ModelConfig) -> dict[str, Any]:
    # As configured: engines look for adapters beside the model's file.
    return {
        "LoraAdapter": config.lora_adapter,
        "LoraBase": config.lora_base,
        "LoraScale": config.lora_scale,
        "LoraAdapters": list(config.lora_adapters),
        "LoraScales": list(config.lora_scales),
    }


def _python_engines(config: ModelConfig) -> dict[str, Any]:
    return {
        "Type": config.type,
        "Quantization": config.quantization,
        "LoadFormat": config.load_format,
        "DType": config.dtype,
        "TrustRemoteCode": config.trust_remote_code,
        "GPUMemoryUtilization": config.gpu_memory_utilization,
        "MaxModelLen": config.max_model_len,
        "TensorParallelSize": config.tensor_parallel_size,
        "EnforceEager": config.enforce_eager,
        "SwapSpace": config.swap_space,
        "DisableLogStatus": config.disable_log_stats,
    }


def _options(config: ModelConfig, parallel: int) -> list[str]:
    """The configured options, and for llama.cpp the defaults for those that are not set."""
    options = list(config.options)
    if is_llama(config.backend):
        named = {one.partition(":")[0] for one in options}
        if not named & {"cache_reuse", "n_cache_reuse"}:
            options.append("cache_reuse:256")
        if uses_tokenizer_template(config) and not named & {"use_jinja", "jinja"}:
            options.append("use_jinja:true")
        if parallel and not named & {"parallel", "n_parallel"}:
            options.append(f"parallel:{parallel}")
    return options


def _engine_args(config: ModelConfig) -> str:
    arguments = dict(config.engine_args)
    if config.backend in ("vllm", "vllm-omni"):
        arguments = {"enable_prefix_caching": True, "enable_chunked_prefill": True, **arguments}
    return msgspec.json.encode(arguments, order="sorted").decode() if arguments else ""
