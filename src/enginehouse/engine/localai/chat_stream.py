"""A chat's events from the replies of a stream: the path of every token.

All replies that arrived together become one bytes object. What is the same in each event is encoded once; per token
there is one string to escape and no object to build. Order per choice: the role, thoughts and content, tool calls, the
reason of the end; after the last choice the usage if it was asked for, and the end marker.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from enginehouse.core.answer_reader import AnswerReader
from enginehouse.core.reasoning import Split
from enginehouse.core.tool_calls import FoundCall
from enginehouse.engine.localai import backend_pb2
from enginehouse.engine.localai.chat_answer import (
    AnswerCall,
    ChatShape,
    Counts,
    call_id,
    finish_reason,
    logprobs_of,
    parse_reply,
    usage_of,
)

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class _StreamedChoice:
    """The state of one choice."""

    def __init__(self, shape: ChatShape) -> None:
        self.reader = AnswerReader(shape.rules)
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.is_mid_character = False
        self.counts = Counts()
        # The last replies with a number of tokens, and with one of the prompt's, as long as these were not read.
        self.counted = b""
        self.counted_prompt = b""
        self.calls: dict[int, AnswerCall] = {}
        self.has_begun = False
        self.is_done = False
        self.is_passing = False  # the next text can be passed on without a look at anything else
        # Engines send content as plain text, as parsed deltas, or as plain text and once more as deltas at the end.
        self.uses_deltas = False
        self.has_thoughts = False
        self.plain: list[str] = []

    def read_counts(self) -> None:
        if self.counted:
            self.counts.tokens = parse_reply(self.counted).tokens
        if self.counted_prompt:
            self.counts.prompt_tokens = parse_reply(self.counted_prompt).prompt_tokens
        self.counted = self.counted_prompt = b""


class ChatEvents:
    """Writes the events of one answer."""

    def __init__(self, shape: ChatShape) -> None:
        self._shape = shape
        self._choices = [_StreamedChoice(shape) for _ in range(shape.choices)]
        self._head = b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,' % (
            _encode(shape.id),
            shape.created,
            _encode(shape.model),
        )
        self._tail = b'},"logprobs":null,"finish_reason":null}]}\n\n'
        self._fronts = [b'%b"choices":[{"index":%d,"delta":{' % (self._head, index) for index in range(shape.choices)]
        self._texts = [front + b'"content":' for front in self._fronts]

    def feed(self, index: int, messages: Sequence[bytes]) -> bytes:
        choice = self._choices[index]
        out: list[bytes] = []
        if not choice.has_begun:
            choice.has_begun = True
            out.append(self._delta(index, b'"role":"assistant","content":""'))
        front, tail = self._texts[index], self._tail
        for message in messages:
            text = _only_text(choice, message) if choice.is_passing else ""
            if text and "<" not in text and "[" not in text:
                if not choice.uses_deltas:
                    choice.plain.append(text)
                out += (front, _encode(text), tail)
            else:
                choice.read_counts()
                self._feed_parsed(index, choice, parse_reply(message), out)
                choice.is_passing = choice.reader.is_passing() and not choice.is_mid_character
        return b"".join(out)

    def finish(self, index: int) -> bytes:
        choice, shape = self._choices[index], self._shape
        out = [self.feed(index, ())]
        choice.read_counts()
        rest = "" if choice.uses_deltas else choice.decoder.decode(b"", final=True)
        first = choice.reader.feed(rest)
        last, found = choice.reader.finish()
        self._write(index, Split(first.reasoning + last.reasoning, first.content + last.content), out)
        if not choice.calls:
            self._write_found(index, found, out)
        reason = finish_reason(shape, choice.counts.tokens, has_calls=bool(choice.calls or found))
        out.append(self._fronts[index] + b'},"logprobs":null,"finish_reason":%b}]}\n\n' % _encode(reason))
        choice.is_done = True
        if all(one.is_done for one in self._choices):
            if shape.includes_usage:
                usage = usage_of((one.counts for one in self._choices), shows_timings=shape.shows_timings)
                out.append(self._head + b'"choices":[],"usage":%b}\n\n' % _encode(usage))
            out.append(DONE)
        return b"".join(out)

    def _feed_parsed(self, index: int, choice: _StreamedChoice, reply: backend_pb2.Reply, out: list[bytes]) -> None:
        choice.counts.take(reply)
        if self._shape.has_logprobs and reply.logprobs:
            shown = logprobs_of(reply.logprobs)
            out.append(self._fronts[index] + b'},"logprobs":%b,"finish_reason":null}]}\n\n' % _encode(shown))
        deltas = reply.chat_deltas
        if deltas and any(one.content or one.reasoning_content or one.tool_calls for one in deltas):
            for delta in deltas:
                self._feed_delta(index, choice, delta, out)
        elif not choice.uses_deltas:
            text = _text(choice, reply.message)
            if text:
                choice.plain.append(text)
                self._write(index, choice.reader.feed(text), out)

    def _feed_delta(self, index: int, choice: _StreamedChoice, delta: backend_pb2.ChatDelta, out: list[bytes]) -> None:
        content = delta.content
        if not choice.uses_deltas:
            choice.uses_deltas = True
            said = "".join(choice.plain)
            if said:
                # The text was sent as it came; the deltas of this engine say it again, parsed. What was passed on
                # stays, what was held back is theirs.
                choice.reader.drop()
                content = content[len(said) :] if content.startswith(said) else "" if content in said else content
        if delta.reasoning_content and not choice.plain:
            if not choice.has_thoughts:
                choice.has_thoughts = True
                # The engine takes the thoughts out, and with them the tag that would end them.
                choice.reader = AnswerReader(msgspec.structs.replace(self._shape.rules, inside=""))
            self._write(index, Split(delta.reasoning_content, ""), out)
        if content:
            self._write(index, choice.reader.feed(content), out)
        for part in delta.tool_calls:
            self._feed_call(index, choice, part, out)

    def _feed_call(
        self, index: int, choice: _StreamedChoice, part: backend_pb2.ToolCallDelta, out: list[bytes]
    ) -> None:
        known = choice.calls.get(part.index)
        if known is None:
            known = choice.calls[part.index] = AnswerCall()
        if part.name and not known.name:
            known.name = part.name
            known.id = part.id or call_id(self._shape, index, part.index)
            out.append(self._call_name(index, part.index, known))
        if part.arguments:
            known.arguments += part.arguments
            out.append(self._call_arguments(index, part.index, part.arguments))

    def _write_found(self, index: int, found: list[FoundCall], out: list[bytes]) -> None:
        for position, one in enumerate(found):
            call = AnswerCall(id=call_id(self._shape, index, position), name=one.name)
            out.append(self._call_name(index, position, call))
            out.append(self._call_arguments(index, position, one.arguments or "{}"))

    # Events ---------------------------------------------------------------------------------------------------------

    def _write(self, index: int, split: Split, out: list[bytes]) -> None:
        if split.reasoning and not self._shape.rules.drops_reasoning:
            out.append(self._thought(index, split.reasoning))
        if split.content:
            out.append(self._delta(index, b'"content":' + _encode(split.content)))

    def _delta(self, index: int, inside: bytes) -> bytes:
        return self._fronts[index] + inside + self._tail

    def _thought(self, index: int, text: str) -> bytes:
        encoded = _encode(text)
        return self._delta(index, b'"reasoning":%b,"reasoning_content":%b' % (encoded, encoded))

    def _call_name(self, index: int, position: int, call: AnswerCall) -> bytes:
        if self._shape.is_legacy:
            return self._delta(index, b'"function_call":{"name":%b,"arguments":""}' % _encode(call.name))
        return self._delta(
            index,
            b'"tool_calls":[{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":""}}]'
            % (position, _encode(call.id), _encode(call.name)),
        )

    def _call_arguments(self, index: int, position: int, arguments: str) -> bytes:
        encoded = _encode(arguments)
        if self._shape.is_legacy:
            return self._delta(index, b'"function_call":{"arguments":%b}' % encoded)
        return self._delta(index, b'"tool_calls":[{"index":%d,"function":{"arguments":%b}}]' % (position, encoded))


def _only_text(choice: _StreamedChoice, message: bytes) -> str:
    """The text of a reply that has no more than `message`, counts, and at most one delta with content alone.

    Most replies of a stream are of this form. Their few bytes of framing are read here, because objects of protobuf
    take several times as long. Lengths are below 128, so that each is one byte. "" if the reply has another form.
    """
    size = len(message)
    if size < 3 or message[0] != 0x0A:
        return ""
    length = message[1]
    position = length + 2
    if length > 125 or position > size:
        return ""
    if position == size:
        text = b"" if choice.uses_deltas else message[2:]
    else:
        tokens_at = position if message[position] == 0x10 else 0
        position = _after_number(message, position) if tokens_at else position
        prompt_at = position if position < size and message[position] == 0x18 else 0
        position = _after_number(message, position) if prompt_at else position
        if position == size and message[size - 1] < 0x80 and not choice.uses_deltas:
            text = message[2 : length + 2]
        else:
            text = _only_delta(message, position) if choice.uses_deltas else b""
        if not text:
            return ""
        if tokens_at:
            choice.counted = message
        if prompt_at:
            choice.counted_prompt = message
    try:
        return text.decode()
    except UnicodeDecodeError:
        return ""  # part of a character


def _only_delta(message: bytes, position: int) -> bytes:
    """The content of a delta that is the rest of a reply and has nothing else; b"" if it is another form."""
    inner = message[position : position + 4]
    if len(inner) < 4 or inner[0] != 0x42 or inner[2] != 0x0A or inner[3] > 125 or inner[1] != inner[3] + 2:
        return b""
    text = message[position + 4 :]
    return text if len(text) == inner[3] else b""


def _after_number(message: bytes, position: int) -> int:
    """The end of a field with a number, whose bytes but the last have their highest bit set."""
    position += 2
    while position < len(message) and message[position - 1] >= 0x80:
        position += 1
    return position


def _text(choice: _StreamedChoice, message: bytes) -> str:
    """The complete characters; the rest of a character waits for the next reply."""
    if not choice.is_mid_character:
        try:
            return message.decode()
        except UnicodeDecodeError:
            pass
    text = choice.decoder.decode(message)
    choice.is_mid_character = bool(choice.decoder.getstate()[0])
    return text
