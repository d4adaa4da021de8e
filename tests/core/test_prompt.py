"""Prompts from templates, with templates in the style of LocalAI's gallery."""

from __future__ import annotations

from typing import Any

import pytest

from enginehouse.core.errors import Invalid
from enginehouse.core.model_config import ModelConfig, read_config
from enginehouse.core.prompt import ChatMessage, Surroundings, chat_prompt, completion_prompt
from enginehouse.core.tool_grammar import ToolFunction

CHATML = {
    "template": {
        "chat": "{{.Input}}\n<|im_start|>assistant\n",
        "chat_message": '<|im_start|>{{if eq .RoleName "tool"}}tool{{else}}{{.RoleName}}{{end}}\n'
        "{{- if .FunctionCall}}\n<tool_call>{{toJson .FunctionCall}}</tool_call>{{end}}\n"
        "{{- if .Content}}\n{{.Content}}{{end}}<|im_end|>",
        "function": "<|im_start|>system\n"
        "{{range .Functions}}{{.Name}}: {{.Description}} {{toJson .Parameters}}\n{{end}}"
        "<|im_end|>\n{{.Input}}\n<|im_start|>assistant\n",
        "completion": "{{.Input}}!",
    }
}
HELLO = [ChatMessage(role="system", content="Be kind."), ChatMessage(role="user", content="Hello")]
WEATHER = ToolFunction(name="get_weather", description="It <tells>", parameters={"type": "object"})


def _config(mapping: dict[str, Any]) -> ModelConfig:
    config, warnings = read_config({"name": "m", **mapping})
    assert warnings == []
    return config


def test_messages_are_rendered_and_joined() -> None:
    assert chat_prompt(_config(CHATML), HELLO, Surroundings()) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_use_their_own_template() -> None:
    prompt = chat_prompt(_config(CHATML), HELLO[1:], Surroundings(functions=(WEATHER,)))
    assert prompt == (
        '<|im_start|>system\nget_weather: It <tells> {"type":"object"}\n<|im_end|>\n'
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_calls_of_the_past_are_in_the_prompt() -> None:
    call: dict[str, object] = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    messages = [ChatMessage(role="assistant", tool_calls=(call,)), ChatMessage(role="tool", content="sunny")]
    prompt = chat_prompt(_config(CHATML), messages, Surroundings())
    assert '<tool_call>[{"function":{"arguments":"{}","name":"get_weather"},"id":"1","type":"function"}]' in prompt
    assert "<|im_start|>tool\nsunny<|im_end|>" in prompt


def test_without_a_template_roles_are_prefixes() -> None:
    config = _config({"roles": {"user": "USER: ", "assistant": "BOT: ", "assistant_function_call": "CALLS: "}})
    call: dict[str, object] = {"function": {"name": "f"}}
    messages = [*HELLO, ChatMessage(role="assistant", tool_calls=(call,)), ChatMessage(role="user")]
    assert chat_prompt(config, messages, Surroundings()) == (
        'Be kind.\nUSER: Hello\nCALLS: [{"function":{"name":"f"}}]'
    )


def test_messages_are_joined_as_configured_and_empty_ones_left_out() -> None:
    config = _config(
        {"template": {"chat_message": "{{.Content}}", "chat": "[{{.Input}}]", "join_chat_messages_by_character": "|"}}
    )
    messages = [ChatMessage(role="user", content=text) for text in ("a", "", "b")]
    assert chat_prompt(config, messages, Surroundings()) == "[a|b]"


def test_media_are_marked_before_the_text() -> None:
    config = _config({"roles": {"user": "U:"}})
    messages = [
        ChatMessage(role="user", content="look", images=2, videos=1),
        ChatMessage(role="user", content="again", videos=1, audios=1),
    ]
    prompt = chat_prompt(config, messages, Surroundings(media_marker="<img>"))
    assert prompt == "U:<img><img>[vid-0]look\nU:<img>[vid-1]again"


def test_templates_may_be_files() -> None:
    config = _config({"template": {"chat": "mine", "chat_message": "{{.Content}}"}, "parameters": {"model": "m.gguf"}})
    files = {"mine": "<{{.Input}}>", "m.gguf": "default {{.Input}}"}
    assert chat_prompt(config, HELLO[1:], Surroundings(files=files)) == "<Hello>"
    bare = _config({"roles": {"user": "U:"}, "parameters": {"model": "m.gguf"}})
    assert chat_prompt(bare, HELLO[1:], Surroundings(files=files)) == "default U:Hello"
    assert completion_prompt(bare, "x", files) == "default x"


def test_the_system_prompt_and_switches_are_seen_by_templates() -> None:
    template = "{{.SystemPrompt}}|{{.SuppressSystemPrompt}}|{{.ReasoningEffort}}|{{.Metadata.mode}}|{{.Input}}"
    config = _config({"template": {"chat": template}, "system_prompt": "sys"})
    around = Surroundings(reasoning_effort="low", metadata={"mode": "x"})
    assert chat_prompt(config, HELLO, around) == "sys|true|low|x|Be kind.\nHello"
    assert chat_prompt(config, HELLO[1:], around) == "sys|false|low|x|Hello"


def test_completions_have_their_own_template() -> None:
    assert completion_prompt(_config(CHATML), "Once", {}) == "Once!"
    assert completion_prompt(_config({}), "Once", {}) == "Once"


def test_a_template_that_fails_is_an_error_that_says_where() -> None:
    config = _config({"template": {"chat": "\n{{.Nothing}}"}})
    with pytest.raises(Invalid, match=r"line 2: there is no field \.Nothing"):
        chat_prompt(config, HELLO, Surroundings())
