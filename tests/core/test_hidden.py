"""What people who may only look do not see of a configuration."""

from __future__ import annotations

import pytest

from enginehouse.core.hidden import HIDDEN, without_secrets


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"hf_token": "abc"}, {"hf_token": HIDDEN}),
        ({"parameters": {"api_key": "abc", "max_tokens": 5}}, {"parameters": {"api_key": HIDDEN, "max_tokens": 5}}),
        (
            {"options": ["api_key:abc", "gpu:1", "hf_token=x y"]},
            {"options": [f"api_key:{HIDDEN}", "gpu:1", f"hf_token={HIDDEN}"]},
        ),
        ({"mcp": {"remote": "anything"}}, {"mcp": HIDDEN}),
        ({"passwords": ["a", "b"]}, {"passwords": [HIDDEN, HIDDEN]}),
        ({"stopwords": ["<|eot|>"], "token": ""}, {"stopwords": ["<|eot|>"], "token": ""}),
        ({"template": {"chat": "a secret: {{ .Input }}"}}, {"template": {"chat": "a secret: {{ .Input }}"}}),
    ],
)
def test_values_that_look_like_secrets_are_hidden_and_others_are_not(value: object, shown: object) -> None:
    assert without_secrets(value) == shown
