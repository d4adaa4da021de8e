"""What all translators share: the context of a request, its plan, decoding with good messages, and sampling options.

A translator is pure: `plan(body, context)` gives the calls for the engine and the functions that turn their replies
into an answer. Clock, chance, network and engine belong to the caller, who passes in what it got from them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from enginehouse.core.errors import Invalid, Malformed
from enginehouse.core.load_options import THREADS, is_mlx
from enginehouse.core.model_config import ModelConfig
from enginehouse.core.prompt import MEDIA_MARKER
from enginehouse.engine.localai import backend_pb2

T = TypeVar("T")

MAX_INT32 = 2**31 - 1
MAX_CHOICES = 128  # OpenAI's own limit
TOP_K = 40
_PATH = re.compile(r" - at `\$\.?(.*)`$")


class TextContext(Struct, frozen=True, kw_only=True):
    """Everything about a request that is not in its body."""

    config: ModelConfig
    identity: str  # `ModelOptions.Model` of the load, checked by the engine
    model: str  # as the caller named it
    id: str
    created: int
    seed: int = 0  # for requests that name none
    threads: int = 0
    files: dict[str, str] = {}  # template files by name
    media: dict[str, bytes] = {}  # what was fetched for a first plan's `urls`
    media_marker: str = MEDIA_MARKER
    thinks_first: str = ""  # the end tag of thoughts, if the engine's own template begins an answer inside of them
    shows_timings: bool = False  # the header `Extra-Usage`


class PlannedCall(Struct, frozen=True):
    """One call of the engine. Its place in the plan is the index that `EventWriter` takes."""

    method: str
    message: bytes


class EventWriter(Protocol):
    """Turns replies into server-sent events. The caller writes what it returns, in order."""

    def feed(self, index: int, messages: Sequence[bytes]) -> bytes:
        """The events for all replies of call `index` that arrived together."""

    def finish(self, index: int) -> bytes:
        """The last events of call `index`; after the last call also usage and the end marker."""


class Planned(Struct, frozen=True, kw_only=True):
    """The calls of a request, to be made at the same time; or the URLs to fetch before it can be planned."""

    calls: tuple[PlannedCall, ...] = ()
    streams: bool = False
    urls: tuple[str, ...] = ()
    # One reply per call, in the order of the calls. Not for streams.
    whole: Callable[[Sequence[bytes]], bytes] | None = None
    # A new writer. For streams only.
    events: Callable[[], EventWriter] | None = None


class Sampled(Struct, frozen=True, kw_only=True):
    """The fields of requests that generate text."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repeat_penalty: float | None = None
    n_keep: int | None = None
    batch: int | None = None
    ignore_eos: bool | None = None
    negative_prompt: str | None = None
    negative_prompt_scale: float | None = None
    grammar: str | None = None
    logit_bias: dict[str, float] | None = None


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


def decode(body: bytes, kind: type[T]) -> T:
    """A request as a struct. A field of the wrong type is named."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        match = _PATH.search(str(error))
        param = match.group(1) if match else None
        cause = _PATH.sub("", str(error))
        where = f"`{param}`" if param else "the request"
        raise Malformed(f"cannot use {where}: {cause}", code="invalid_json", param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"cannot read the request as JSON: {error}", code="invalid_json") from error


def refuse(param: str, cause: str) -> Malformed:
    """A value that is out of range."""
    return Malformed(f"cannot use `{param}`: {cause}", code="invalid_json", param=param)


def unsupported(param: str, cause: str) -> Invalid:
    """A feature that LocalAI's engines do not have."""
    return Invalid(f"cannot use `{param}`: {cause}", code="unsupported", param=param)


def check_sampling(request: Sampled) -> None:
    for name, low, high in (
        ("temperature", 0.0, 100.0),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("typical_p", 0.0, 1.0),
        ("frequency_penalty", -100.0, 100.0),
        ("presence_penalty", -100.0, 100.0),
        ("repeat_penalty", 0.0, 100.0),
        ("top_k", -1, MAX_INT32),
        ("max_tokens", -1, MAX_INT32),  # -1 and 0: no limit, as several programs send it
        ("max_completion_tokens", -1, MAX_INT32),
        ("n_keep", -1, MAX_INT32),
        ("batch", 0, MAX_INT32),
        ("n", 1, MAX_CHOICES),
    ):
        value = getattr(request, name)
        if value is not None and not (math.isfinite(value) and low <= value <= high):
            raise refuse(name, f"it must be between {low} and {high}")
    if isinstance(request.stop, list) and any(not one for one in request.stop):
        raise refuse("stop", "a stop text must not be empty")


def max_tokens_of(request: Sampled, config: ModelConfig) -> int:
    """0 is no limit."""
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    return max(0, config.parameters.max_tokens if asked is None else asked)


def predict_options(request: Sampled, context: TextContext) -> backend_pb2.PredictOptions:
    """The options of one call, without prompt and seed."""
    config, defaults = context.config, context.config.parameters
    top_k = defaults.top_k if defaults.top_k is not None else 0 if is_mlx(config.backend) else TOP_K
    stop = [request.stop] if isinstance(request.stop, str) and request.stop else request.stop or []
    options = backend_pb2.PredictOptions(
        ModelIdentity=context.identity,
        Threads=config.threads or context.threads or THREADS,
        Tokens=max_tokens_of(request, config),
        TopK=_asked(request.top_k, top_k),
        TopP=_asked(request.top_p, defaults.top_p),
        MinP=_asked(request.min_p, defaults.min_p),
        Temperature=_asked(request.temperature, defaults.temperature),
        TypicalP=_asked(request.typical_p, defaults.typical_p),
        TailFreeSamplingZ=defaults.tail_free_z,
        FrequencyPenalty=request.frequency_penalty or defaults.frequency_penalty,
        PresencePenalty=request.presence_penalty or defaults.presence_penalty,
        Penalty=request.repeat_penalty or defaults.repeat_penalty,
        Repeat=defaults.repeat_last_n,
        NKeep=_asked(request.n_keep, defaults.n_keep),
        Batch=request.batch or defaults.batch,
        IgnoreEOS=_asked(request.ignore_eos, defaults.ignore_eos),
        NegativePrompt=_asked(request.negative_prompt, defaults.negative_prompt),
        NegativePromptScale=_asked(request.negative_prompt_scale, defaults.negative_prompt_scale),
        Grammar=_asked(request.grammar, config.grammar),
        StopPrompts=list(dict.fromkeys([*config.stopwords, *stop])),
        Mirostat=config.mirostat,
        MirostatETA=config.mirostat_eta,
        MirostatTAU=config.mirostat_tau,
        F16KV=bool(config.f16),
        DebugMode=bool(config.debug),
        MLock=config.mmlock,
        MMap=config.mmap is not False,
        PromptCacheAll=config.prompt_cache_all,
        PromptCacheRO=config.prompt_cache_ro,
        MainGPU=config.main_gpu,
        TensorSplit=config.tensor_split,
        RopeFreqBase=config.rope_freq_base,
        RopeFreqScale=config.rope_freq_scale,
        NDraft=config.n_draft,
    )
    bias = request.logit_bias or defaults.logit_bias
    if bias:
        options.LogitBias = msgspec.json.encode(bias).decode()
    return options


def seeded(options: backend_pb2.PredictOptions, request: Sampled, context: TextContext, choice: int) -> bytes:
    """The message for one of several choices. Each has a seed of its own, or all of them would be the same."""
    seed = request.seed if request.seed is not None and request.seed >= 0 else context.config.parameters.seed
    options.Seed = ((context.seed if seed < 0 else seed) + choice) & MAX_INT32
    return options.SerializeToString()


def _asked(value: Any, default: Any) -> Any:
    return default if value is None else value
