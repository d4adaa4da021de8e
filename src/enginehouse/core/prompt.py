"""Prompts from messages, for models whose configuration has templates of its own.

Each message is rendered by one template, and the joined messages by another. Without a template for messages, a
message is the text that the configuration puts before its role, and its content. Template files are given as texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from enginehouse.core.go_template import render
from enginehouse.core.model_config import ModelConfig
from enginehouse.core.template_values import TemplateRecord
from enginehouse.core.tool_grammar import ToolFunction

MEDIA_MARKER = "<__media__>"  # engines that name another one get theirs


class ChatMessage(Struct, frozen=True, kw_only=True):
    """One message of a chat as text. `tool_calls` have OpenAI's shape."""

    role: str
    content: str = ""
    name: str = ""
    tool_calls: tuple[dict[str, object], ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""
    images: int = 0
    audios: int = 0
    videos: int = 0


class Surroundings(Struct, frozen=True, kw_only=True):
    """What templates see beside the messages."""

    functions: tuple[ToolFunction, ...] = ()
    reasoning_effort: str = ""
    metadata: dict[str, str] = {}
    files: dict[str, str] = {}  # template files by name, without `.tmpl`
    media_marker: str = MEDIA_MARKER


def chat_prompt(config: ModelConfig, messages: Sequence[ChatMessage], around: Surroundings) -> str:
    """The whole prompt of a chat."""
    videos = 0
    rendered = []
    for index, message in enumerate(messages):
        content = _with_markers(message, videos, around.media_marker)
        videos += message.videos
        text = _message(config, messages, index, content, around)
        if text:
            rendered.append(text)
    joined = ("\n" if config.template.join_by is None else config.template.join_by).join(rendered)
    name = "function" if around.functions and config.template.function else "chat"
    template = _template(config, name, around.files)
    if not template:
        return joined
    return render(
        template,
        TemplateRecord(
            SystemPrompt=config.system_prompt,
            SuppressSystemPrompt=any(message.role == "system" for message in messages),
            Input=joined,
            Instruction="",
            Functions=[
                TemplateRecord(Name=one.name, Description=one.description, Parameters=one.parameters)
                for one in around.functions
            ],
            MessageIndex=0,
            ReasoningEffort=around.reasoning_effort,
            Metadata=dict(around.metadata),
        ),
    )


def completion_prompt(config: ModelConfig, text: str, files: Mapping[str, str]) -> str:
    """The prompt of a completion."""
    template = _template(config, "completion", files)
    if not template:
        return text
    values = TemplateRecord(Input=text, SystemPrompt=config.system_prompt, SuppressSystemPrompt=False, Instruction="")
    return render(template, values | {"ReasoningEffort": config.reasoning_effort, "Metadata": {}})


def _template(config: ModelConfig, name: str, files: Mapping[str, str]) -> str:
    """A template is given in place or by the name of a file; the file of the model's own name is the default."""
    given: str = getattr(config.template, name)
    if not given:
        return files.get(config.parameters.model, "") if name in ("chat", "completion") else ""
    return given if "{{" in given else files.get(given.strip(), given)


def _message(
    config: ModelConfig, messages: Sequence[ChatMessage], index: int, content: str, around: Surroundings
) -> str:
    message = messages[index]
    role = message.role
    if role == "assistant" and message.tool_calls and "assistant_function_call" in config.roles:
        role = "assistant_function_call"
    prefix = config.roles.get(role, "")
    template = _template(config, "chat_message", around.files)
    calls = list(message.tool_calls)
    if not template:
        listed = msgspec.json.encode(calls).decode() if calls else ""
        text = content + ("\n" if content and listed else "") + listed
        return f"{prefix}{text}" if text else ""
    return render(
        template,
        TemplateRecord(
            SystemPrompt=config.system_prompt,
            Role=prefix or message.role,
            RoleName=message.role,
            FunctionName=message.name,
            Content=content,
            MessageIndex=index,
            Function=bool(around.functions),
            FunctionCall=calls or None,
            LastMessage=index == len(messages) - 1,
            Reasoning=message.reasoning,
        ),
    )


def _with_markers(message: ChatMessage, videos_before: int, marker: str) -> str:
    """Engines put the media of a request where their markers are, in order."""
    markers = marker * (message.audios + message.images)
    markers += "".join(f"[vid-{videos_before + number}]" for number in range(message.videos))
    return markers + message.content
