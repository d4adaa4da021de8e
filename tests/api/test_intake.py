"""Reading a request before its engine does."""

from __future__ import annotations

import json

from enginehouse.api.intake import model_asked_for, with_model


def test_another_model_is_named_and_nothing_else_changes() -> None:
    body = b'{"model":"gpt-4o","messages":[{"role":"user","content":"caf\\u00e9 \\ud83d\\ude00"}],"seed":1e2,"n":1.0}'
    renamed = with_model(body, 'org/"llama"')
    assert model_asked_for(renamed) == 'org/"llama"'
    before, after = json.loads(body), json.loads(renamed)
    assert {**before, "model": 'org/"llama"'} == after
    assert b'"seed":1e2,"n":1.0' in renamed, "numbers are passed as they were written"
