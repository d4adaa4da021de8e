"""Which of a model's files an engine opens."""

from __future__ import annotations

from typing import Any

import pytest

from enginehouse.core.load_options import ModelPaths
from enginehouse.core.model import Model, ModelFile, load_options, main_file, served_config


def model(names: list[str], **config: Any) -> Model:
    files = tuple(ModelFile(name, f"https://example.org/{name}", "") for name in names)
    return Model(name="m", backend="llama-cpp", files=files, config=config)


@pytest.mark.parametrize(
    ("names", "config", "opened"),
    [
        (["m.gguf"], {}, "m.gguf"),
        (["sub/m.gguf"], {"parameters": {"model": "sub/m.gguf"}}, "sub/m.gguf"),
        (["m.gguf", "mmproj.gguf"], {"mmproj": "mmproj.gguf"}, "m.gguf"),
        (["m.gguf", "draft.gguf"], {"parameters": {"model": "m.gguf"}, "draft_model": "draft.gguf"}, "m.gguf"),
        (["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"], {}, "m-00001-of-00002.gguf"),
        (["m.gguf"], {"parameters": {"model": "hf:org/repo/m.gguf"}}, "m.gguf"),
        (["model.safetensors", "config.json"], {"parameters": {"model": "org/repo"}}, ""),
    ],
)
def test_an_engine_opens_the_model_itself_or_its_directory(
    names: list[str], config: dict[str, Any], opened: str
) -> None:
    made = model(names, **config)
    assert main_file(made, served_config(made)) == opened
    options = load_options(made, ModelPaths(directory="/models/m", threads=2))
    assert options["ModelFile"] == f"/models/m/{opened}".rstrip("/")
    assert options["ModelPath"] == "/models/m"
    if "mmproj" in config:
        assert options["MMProj"] == "/models/m/mmproj.gguf"
