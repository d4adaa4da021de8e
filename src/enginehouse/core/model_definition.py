"""From a configuration in the form of LocalAI's model YAML to a model, and back.

Pure. A configuration names files in several ways (`download_files`, `artifacts`, URLs as `parameters.model`, `mmproj`
or `draft_model`); `needs_of` lists them, somebody else finds them, and `make_model` puts the parts together. Nothing of
a configuration is lost: the stored mapping keeps every key, and `exported` gives it back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from enginehouse.core.errors import Invalid
from enginehouse.core.file_name import check_file_name, check_file_names
from enginehouse.core.model import Model, ModelFile, ModelOptions
from enginehouse.core.model_config import ModelConfig, read_config
from enginehouse.core.model_source import (
    FoundModel,
    check_sha256,
    is_repository,
    is_source,
    parse_source,
    plain_file_name,
)
from enginehouse.core.name import check_model_name, shown

MAX_DEPTH = 32  # of a configuration
MAX_MODELS = 200  # of one import
MAX_CONTEXT = 8192  # what LocalAI takes of a longer context that a model was trained on, where nobody asked for more
COMPANION_KEYS = ("mmproj", "draft_model")
_MAIN_KEYS = ("parameters.model", *COMPANION_KEYS)
# Engines of LocalAI that read a directory of weights.
_DIRECTORY_BACKENDS = frozenset(
    re.findall(
        r"\S+",
        "transformers diffusers vllm vllm-omni sglang sentencetransformers mlx mlx-vlm qwen-asr qwen-tts nemo voxcpm "
        "fish-speech liquid-audio longcat-video",
    )
)


class FileNeed(Struct, frozen=True, kw_only=True):
    """A source that a configuration names. `name` is how the file is called there; "" leaves it to the source."""

    key: str
    source: str
    name: str = ""
    sha256: str = ""
    credential: str = ""
    allow: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    is_directory: bool = False


def check_nesting(config: Mapping[str, Any]) -> None:
    """Refuse a configuration that is nested deeper than any that makes sense; the other functions here recurse."""
    level: list[object] = [config]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ())
        ]
        if not level:
            return
    raise Invalid(
        f"cannot use the model's configuration: it is nested deeper than {MAX_DEPTH}",
        code="unsupported",
        param="config",
    )


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`under` with the values of `over`, map by map; lists and plain values are replaced. The order is kept."""
    result = dict(under)
    for key, value in over.items():
        known = result.get(key)
        result[key] = merged(known, value) if isinstance(known, Mapping) and isinstance(value, Mapping) else value
    return result


def patched(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with changes merged; a change to null removes the key."""
    result = dict(config)
    for key, value in changes.items():
        known = result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            result[key] = patched(known if isinstance(known, Mapping) else {}, value)
        else:
            result[key] = value
    return result


def with_templates(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the texts of `prompt_templates` in the places of their names."""
    given = config.get("prompt_templates")
    result = {key: value for key, value in config.items() if key != "prompt_templates"}
    texts = {
        str(one.get("name")): str(one.get("content"))
        for one in (given if isinstance(given, list) else [])
        if isinstance(one, Mapping) and one.get("name") and one.get("content") is not None
    }
    template = result.get("template")
    if texts and isinstance(template, Mapping):
        result["template"] = {
            key: texts.get(value, value) if isinstance(value, str) else value for key, value in template.items()
        }
    return result


def needs_of(config: Mapping[str, Any]) -> list[FileNeed]:
    """The sources that a configuration names, in its order. Raises `Invalid` for one that cannot be used."""
    name = config.get("name")
    found = [_listed(one, name) for one in _items(config, "download_files")]
    found += [need for one in _items(config, "artifacts") if (need := _artifact(one, name)) is not None]
    for key in _MAIN_KEYS:
        value = _at(config, key)
        if isinstance(value, str) and is_source(value) and parse_source(value).kind != "endpoint":
            is_directory = key == "parameters.model" and _backend(config) in _DIRECTORY_BACKENDS
            found.append(FileNeed(key=key, source=value, is_directory=is_directory))
    model = _at(config, "parameters.model")
    if not found and isinstance(model, str) and is_repository(model) and _backend(config) in _DIRECTORY_BACKENDS:
        found.append(FileNeed(key="parameters.model", source=f"hf:{model}", is_directory=True))
    return found


def with_companions(
    config: Mapping[str, Any], needs: Sequence[FileNeed], found: Sequence[FoundModel]
) -> dict[str, Any]:
    """The configuration with files in the places of addresses of companions: engines open them by name.

    Their addresses move to `download_files`. The address of the model itself stays: it is the model's identity.
    """
    result = dict(config)
    for need, one in zip(needs, found, strict=True):
        if need.key in COMPANION_KEYS:
            name = one.files[0].name
            listed = _items(result, "download_files")
            result |= {need.key: name, "download_files": [*listed, {"filename": name, "uri": need.source}]}
    return result


def _listed(one: object, name: object) -> FileNeed:
    if not isinstance(one, Mapping) or not isinstance(one.get("uri"), str):
        raise Invalid(f"cannot use `download_files` of {name}: each needs a `uri`", code="unsupported", param="files")
    uri = str(one["uri"])
    parse_source(uri)
    given = one.get("filename") or one.get("name") or ""
    called = check_file_name(str(given)) if given else plain_file_name(uri)
    digest = check_sha256(str(one.get("sha256") or ""), called or uri)
    return FileNeed(
        key="download_files", source=uri, name=called, sha256=digest, credential=str(one.get("credential") or "")
    )


def _artifact(one: object, name: object) -> FileNeed | None:
    source = one.get("source") if isinstance(one, Mapping) else None
    if not isinstance(source, Mapping) or source.get("type") != "huggingface" or not source.get("repo"):
        raise Invalid(
            f"cannot use `artifacts` of {name}: each needs a `source` of the type huggingface with a `repo`",
            code="unsupported",
            param="artifacts",
        )
    revision = str(source.get("revision") or "main")
    return FileNeed(
        key="artifacts",
        source=f"hf:{source['repo']}@{revision}",
        credential=str(source.get("token_env") or ""),
        allow=_texts(source.get("allow_patterns")),
        ignore=_texts(source.get("ignore_patterns")),
        is_directory=True,
    )


def _items(config: Mapping[str, Any], key: str) -> list[object]:
    value = config.get(key)
    return value if isinstance(value, list) else []


def _texts(value: object) -> tuple[str, ...]:
    return tuple(str(one) for one in value) if isinstance(value, list) else ()


def _at(config: Mapping[str, Any], key: str) -> object:
    head, dot, rest = key.partition(".")
    value = config.get(head)
    return (value.get(rest) if isinstance(value, Mapping) else None) if dot else value


def _backend(config: Mapping[str, Any]) -> str:
    value = config.get("backend")
    return value if isinstance(value, str) else ""


class ModelParts(Struct, frozen=True, kw_only=True):
    """What a model is made of besides its configuration."""

    files: tuple[ModelFile, ...] = ()
    license: str = ""
    description: str = ""
    replicas: int = 1
    context_length: int = 0  # that the model was trained on
    cache_bytes_per_token: int = 0


def make_model(config: Mapping[str, Any], parts: ModelParts) -> tuple[Model, list[str]]:
    """The model of a configuration that has `name` and `backend`, and warnings about keys without effect."""
    typed, warnings = read_config(config)
    check_model_name(typed.name)
    if typed.alias:
        if parts.files:
            raise Invalid(
                f"cannot add {shown(typed.name)}: it is an alias of {shown(typed.alias)} and has a source too; leave "
                "out one of them",
                code="unsupported",
                param="alias",
            )
        return make_alias(typed.name, typed.alias, config), warnings
    if not typed.backend:
        raise Invalid(
            f"cannot add {shown(typed.name)}: it names no backend; set `backend`", code="invalid_name", param="backend"
        )
    files = ordered(parts.files, typed)
    _check_files(typed, files)
    if not 1 <= parts.replicas <= 1000:
        raise Invalid("cannot use this number of replicas: it must be 1 to 1000", code="invalid_name", param="replicas")
    model = Model(
        name=typed.name,
        backend=typed.backend,
        files=files,
        options=_options(typed, parts.context_length),
        cache_bytes_per_token=parts.cache_bytes_per_token,
        description=_plain_text(config.get("description")) or parts.description,
        license=_plain_text(config.get("license")) or parts.license,
        replicas=parts.replicas,
        config=plain(config),
    )
    return model, warnings


def make_alias(name: str, alias: str, config: Mapping[str, Any]) -> Model:
    """Another name of a model. Whether that one exists is checked where it is stored."""
    check_model_name(alias)
    if alias == name:
        raise Invalid(f"cannot add {shown(name)}: it would be an alias of itself", code="invalid_name", param="alias")
    description = _plain_text(config.get("description")) or f"another name of {alias}"
    kept = {"name": name, "alias": alias} | plain(config)
    return Model(name=name, backend="", files=(), description=description, config=kept, alias=alias)


def ordered(files: Iterable[ModelFile], typed: ModelConfig) -> tuple[ModelFile, ...]:
    """The files, the model itself first and its companions last: engines load the first."""
    last = {typed.mmproj, typed.draft_model} - {""}
    every = list({file.name: file for file in files}.values())
    return tuple(sorted(every, key=lambda file: (file.name != typed.parameters.model, file.name in last)))


def _check_files(typed: ModelConfig, files: Sequence[ModelFile]) -> None:
    names = [file.name for file in files]
    check_file_names(names)
    for key, value in (
        ("parameters.model", typed.parameters.model),
        ("mmproj", typed.mmproj),
        ("draft_model", typed.draft_model),
    ):
        is_directory = key == "parameters.model" and typed.backend in _DIRECTORY_BACKENDS
        if value and value not in names and not is_source(value) and not is_directory:
            raise Invalid(
                f"cannot add {shown(typed.name)}: its file {shown(value)} (`{key}`) has no source; add it to "
                "`download_files` with its `uri`",
                code="unsupported",
                param="files",
            )
    if not files and typed.backend not in _DIRECTORY_BACKENDS:
        raise Invalid(
            f"cannot add {shown(typed.name)}: it has no files; give a source, or `parameters.model`",
            code="unsupported",
            param="source",
        )


def _options(typed: ModelConfig, context_length: int) -> ModelOptions:
    """The options for engines that take no configuration."""
    named = dict(one.partition(":")[::2] for one in typed.options)
    parallel = named.get("parallel", named.get("n_parallel", ""))
    context = typed.context_size or 0
    if typed.context_size is None:
        context = min(context_length, MAX_CONTEXT)
    return ModelOptions(
        context_size=context_length if context < 0 else context,
        parallel=int(parallel) if parallel.isdecimal() and len(parallel) < 4 else 0,
        threads=max(0, typed.threads or 0),
        system_prompt=typed.system_prompt,
    )


def _plain_text(value: object) -> str:
    return " ".join(value.split()) if isinstance(value, str) else ""


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that survives storage as JSON: keys are text."""
    copied: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(dict(config)))
    return copied


def exported(model: Model) -> dict[str, Any]:
    """The configuration to write as YAML: what was imported, completed so that it can be imported again."""
    config = dict(model.config) or _described(model)
    result: dict[str, Any] = {"name": model.name, **config} if "name" not in config else config
    result["name"] = model.name
    if model.alias:
        return result
    result["backend"] = model.backend
    parameters = result.get("parameters")
    own = parameters if isinstance(parameters, Mapping) else {}
    if model.files and not own.get("model"):
        result["parameters"] = {**own, "model": model.files[0].name}
    if not needs_of(result):  # it was not imported, or its files were given beside it
        told = {"description": model.description, "license": model.license}
        result |= {key: value for key, value in told.items() if value and key not in result}
        result["download_files"] = [
            {
                "filename": file.name,
                "uri": file.uri,
                **({"sha256": file.sha256} if file.sha256 else {}),
                **({"credential": file.credential} if file.credential else {}),
            }
            for file in model.files
        ]
    return result


def _described(model: Model) -> dict[str, Any]:
    """The configuration of a model that was not made from one."""
    configuration = model.configuration
    return {key: configuration[key] for key in ("name", "backend", *(k for k in configuration if k != "name"))}
