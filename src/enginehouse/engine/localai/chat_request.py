"""The body of a chat request, and its parts in the form that engines take: messages, media, tools, reasoning.

OpenAI's fields, LocalAI's extensions and the legacy `functions`. Fields that are not known are ignored, because clients
send more than any engine uses; a known field of the wrong type is refused with its name.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any

import msgspec
from msgspec import Struct, field

from enginehouse.core.json_grammar import grammar_of, json_grammar
from enginehouse.core.model_config import ModelConfig
from enginehouse.core.prompt import ChatMessage
from enginehouse.core.tool_grammar import ToolFunction
from enginehouse.engine.localai.planning import Sampled, TextContext, refuse, unsupported

MAX_TOOLS = 1024
MAX_URL = 2048
_FORBIDDEN_URL = re.compile(r"[\x00-\x20\x7f]")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


class MediaUrl(Struct, frozen=True):
    url: str


class InputAudio(Struct, frozen=True):
    data: str
    format: str | None = None


class ContentPart(Struct, frozen=True):
    """One part of a message's content."""

    type: str
    text: str | None = None
    image_url: str | MediaUrl | None = None
    image: str | MediaUrl | None = None
    audio_url: str | MediaUrl | None = None
    audio: str | MediaUrl | None = None
    video_url: str | MediaUrl | None = None
    video: str | MediaUrl | None = None
    input_audio: InputAudio | None = None
    refusal: str | None = None


class RequestMessage(Struct, frozen=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class FunctionSpec(Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Struct, frozen=True):
    type: str = "function"
    function: FunctionSpec | None = None


class SchemaSpec(Struct, frozen=True):
    name: str | None = None
    schema: Any = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    type: str
    json_schema: SchemaSpec | None = None
    schema: Any = None


class ChatRequest(Sampled, frozen=True, kw_only=True):
    messages: list[RequestMessage]
    tools: list[ToolSpec] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionSpec] | None = None
    function_call: Any = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    metadata: dict[str, str | int | float | bool] | None = field(default=None)


class Media(Struct):
    """Media of a request in order, as base64; and the URLs that are still to be fetched."""

    images: list[str] = []
    audios: list[str] = []
    videos: list[str] = []
    urls: list[str] = []


def read_messages(request: ChatRequest, context: TextContext) -> tuple[list[ChatMessage], Media]:
    if not request.messages:
        raise refuse("messages", "it must have one message or more")
    media = Media()
    return [_message(one, f"messages[{n}]", media, context) for n, one in enumerate(request.messages)], media


def _message(message: RequestMessage, path: str, media: Media, context: TextContext) -> ChatMessage:
    if not message.role:
        raise refuse(f"{path}.role", "it must not be empty")
    before = (len(media.images), len(media.audios), len(media.videos))
    content = message.content or ""
    if isinstance(content, list):
        content = "".join(_part(one, f"{path}.content[{n}]", media, context) for n, one in enumerate(content))
    calls = list(message.tool_calls or [])
    if message.function_call:
        calls.append({"type": "function", "function": message.function_call})
    return ChatMessage(
        # Only new models know the role that OpenAI renamed.
        role="system" if message.role == "developer" else message.role,
        content=content,
        name=message.name or "",
        tool_calls=tuple(calls),
        tool_call_id=message.tool_call_id or "",
        reasoning=message.reasoning or message.reasoning_content or "",
        images=len(media.images) - before[0],
        audios=len(media.audios) - before[1],
        videos=len(media.videos) - before[2],
    )


def _part(part: ContentPart, path: str, media: Media, context: TextContext) -> str:
    """The text of a part; what is no text goes to the media."""
    if part.type in ("text", "input_text", "output_text"):
        if part.text is None:
            raise refuse(f"{path}.text", "a part of this type needs it")
        return part.text
    if part.type == "refusal":
        return part.refusal or ""
    if part.type == "input_audio" and part.input_audio:
        media.audios.append(_checked_base64(part.input_audio.data, f"{path}.input_audio.data"))
        return ""
    for kinds, into in (
        (("image_url", "image"), media.images),
        (("audio_url", "audio"), media.audios),
        (("video_url", "video"), media.videos),
    ):
        if part.type in kinds:
            source = getattr(part, kinds[0]) or getattr(part, kinds[1])
            if source is None:
                raise refuse(f"{path}.{part.type}", "a part of this type needs it")
            url = source if isinstance(source, str) else source.url
            into.append(_medium(url, f"{path}.{part.type}", media, context))
            return ""
    raise refuse(f"{path}.type", f"{part.type!r} is not a known type of content")


def _medium(url: str, path: str, media: Media, context: TextContext) -> str:
    if url.startswith("data:"):
        head, comma, content = url.partition(",")
        if not comma or not head.endswith(";base64"):
            raise refuse(path, "a `data:` URL must have base64 content")
        return _checked_base64(content, path)
    if not url.startswith(("http://", "https://")) or len(url) > MAX_URL or _FORBIDDEN_URL.search(url):
        raise refuse(path, "it must be a `data:` URL with base64 content or an HTTP URL")
    fetched = context.media.get(url)
    if fetched is None:
        if url not in media.urls:
            media.urls.append(url)
        return ""
    return base64.b64encode(fetched).decode()


def _checked_base64(content: str, path: str) -> str:
    try:
        binascii.a2b_base64(content.encode("ascii"), strict_mode=True)
    except (ValueError, UnicodeEncodeError) as error:
        raise refuse(path, "its content is not base64") from error
    return content


# Tools --------------------------------------------------------------------------------------------------------------


class ToolUse(Struct, frozen=True, kw_only=True):
    """The functions that a model may call; none if tools are off."""

    functions: tuple[ToolFunction, ...] = ()
    choice: str = ""  # JSON text for the engine
    is_demanded: bool = False
    is_legacy: bool = False

    def tools_text(self) -> str:
        """OpenAI's list of tools as JSON."""
        tools = []
        for one in self.functions:
            described: dict[str, Any] = {"name": one.name, "description": one.description, "parameters": one.parameters}
            if one.strict:
                described["strict"] = True
            tools.append({"type": "function", "function": described})
        return msgspec.json.encode(tools).decode()


def read_tools(request: ChatRequest) -> ToolUse:
    specs = [(f"tools[{n}]", one.function) for n, one in enumerate(request.tools or [])]
    is_legacy = not specs and bool(request.functions)
    if is_legacy:
        specs = [(f"functions[{n}]", one) for n, one in enumerate(request.functions or [])]
    if len(specs) > MAX_TOOLS:
        raise refuse("tools", f"it has {len(specs)} tools, at most {MAX_TOOLS} are allowed")
    functions = []
    for path, spec in specs:
        if spec is None or not spec.name:
            raise refuse(f"{path}.function", "only functions with a name can be tools")
        functions.append(
            ToolFunction(
                name=spec.name,
                description=spec.description or "",
                parameters=spec.parameters or {"type": "object", "properties": {}},
                strict=bool(spec.strict),
            )
        )
    param = "function_call" if is_legacy else "tool_choice"
    return _chosen(tuple(functions), request.function_call if is_legacy else request.tool_choice, param, is_legacy)


def _chosen(functions: tuple[ToolFunction, ...], choice: Any, param: str, is_legacy: bool) -> ToolUse:
    if isinstance(choice, str) and choice.lstrip().startswith("{"):
        try:
            choice = msgspec.json.decode(choice)
        except msgspec.DecodeError as error:
            raise refuse(param, "it is neither a word nor an object") from error
    if choice == "none" or not functions:
        if choice == "required" or isinstance(choice, dict):
            raise refuse(param, "the request has no tools to choose from")
        return ToolUse(is_legacy=is_legacy)
    if choice is None or choice == "auto":
        text = "" if choice is None else '"auto"'
        return ToolUse(functions=functions, choice=text, is_legacy=is_legacy)
    if choice in ("required", "any"):
        return ToolUse(functions=functions, choice='"required"', is_demanded=True, is_legacy=is_legacy)
    if not isinstance(choice, dict):
        raise refuse(param, "it must be 'none', 'auto', 'required' or name a function")
    inner = choice.get("function")
    name = inner.get("name") if isinstance(inner, dict) else choice.get("name")
    wanted = tuple(one for one in functions if one.name == name)
    if not wanted:
        raise refuse(param, f"there is no tool {name!r}")
    # Engines may take a named choice as "any of these", so they see no other function.
    text = msgspec.json.encode({"type": "function", "function": {"name": name}}).decode()
    return ToolUse(functions=wanted, choice=text, is_demanded=True, is_legacy=is_legacy)


# Format and reasoning -----------------------------------------------------------------------------------------------


def format_grammar(response_format: ResponseFormat | None) -> str:
    """The grammar that a format asks for, or ""."""
    if response_format is None or response_format.type == "text":
        return ""
    if response_format.type == "json_object":
        if response_format.schema is not None:
            return grammar_of(response_format.schema, "response_format.schema")
        return json_grammar()
    if response_format.type != "json_schema":
        raise unsupported("response_format.type", f"{response_format.type!r} is not supported")
    if response_format.json_schema is not None and response_format.json_schema.schema is not None:
        return grammar_of(response_format.json_schema.schema, "response_format.json_schema.schema")
    if response_format.schema is not None:
        return grammar_of(response_format.schema, "response_format.schema")
    raise refuse("response_format.json_schema", "a format of this type needs its `schema`")


def effort_of(request: ChatRequest, config: ModelConfig) -> str:
    effort = request.reasoning_effort or config.reasoning_effort
    if effort and request.reasoning_effort and effort not in _EFFORTS:
        raise refuse("reasoning_effort", f"it must be one of {', '.join(_EFFORTS)}")
    return effort


def metadata_of(request: ChatRequest, config: ModelConfig) -> dict[str, str]:
    """Switches for the engine's template: derived ones, then the client's, then all of them as one object."""
    effort = effort_of(request, config)
    metadata: dict[str, str] = {}
    if effort == "none" or config.reasoning.disable:
        metadata["enable_thinking"] = "false"
    elif effort or config.reasoning.disable is False:
        metadata["enable_thinking"] = "true"
    if effort:
        metadata["reasoning_effort"] = effort
    for key, value in (request.metadata or {}).items():
        if key != "chat_template_kwargs":
            metadata[key] = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    arguments = dict(config.chat_template_kwargs)
    arguments.update({key: {"true": True, "false": False}.get(value, value) for key, value in metadata.items()})
    if arguments:
        metadata["chat_template_kwargs"] = msgspec.json.encode(arguments).decode()
    return metadata
