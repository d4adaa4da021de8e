"""A conversation with a model through the OpenAI route: history, streaming, and trimming to the model's context.

A broken answer is returned with its error, and the chat can go on. A question without any answer is removed from the
history, so that repeating it does not send it twice.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
from msgspec import Struct, field

from enginehouse.cli.client.connect import FrontendApi, waiting
from enginehouse.cli.terminal import output
from enginehouse.core.errors import EnginehouseError, Unavailable, Upstream

PATH = "/v1/chat/completions"
ANSWER_SECONDS = 900.0  # a long prompt on a slow machine takes minutes until the first token
LOAD_PATIENCE_SECONDS = 600.0  # how long to wait for a model that is loading
# Messages of llama.cpp, vLLM and OpenAI about a conversation that is longer than the model's context.
_TOO_LONG = re.compile(r"exceed\w*.{0,40}context|context.{0,20}(size|length|window)", re.IGNORECASE)


class _Delta(Struct):
    content: str | None = None


class _Choice(Struct):
    delta: _Delta = field(default_factory=_Delta)
    finish_reason: str | None = None


class _Failure(Struct):
    message: str = "the engine gave no reason"


class _Chunk(Struct):
    choices: list[_Choice] = []
    error: _Failure | str | None = None


class ChatAnswer(Struct):
    text: str = ""
    is_stopped: bool = False
    failure: EnginehouseError | None = None


class Conversation:
    def __init__(self, frontend: FrontendApi, model: str, system_prompt: str, *, is_streaming: bool) -> None:
        self.model = model
        self._frontend = frontend
        self._is_streaming = is_streaming
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._said: list[dict[str, str]] = []
        self._is_cut = False  # the last answer reached the limit of the model's context

    def clear(self) -> None:
        self._said.clear()

    def complete(self, question: str) -> object:
        """The complete answer as the frontend sent it, for programs."""
        self._said.append({"role": "user", "content": question})
        body = self._body(is_streaming=False, temperature=0.0)
        return self._frontend.post(PATH, body, timeout_seconds=ANSWER_SECONDS)

    def ask(self, question: str, *, temperature: float | None = None) -> ChatAnswer:
        """Ask, and write the answer to stdout as it arrives. Ctrl-C stops it; the part so far stays in the history."""
        self._said.append({"role": "user", "content": question})
        answer = ChatAnswer()
        self._is_cut = False
        try:
            for piece in self._pieces(temperature):
                answer.text += piece
                sys.stdout.write(output.printable(piece, lines=True))
                sys.stdout.flush()
        except KeyboardInterrupt:
            answer.is_stopped = True
        except EnginehouseError as error:
            answer.failure = error
        if answer.text and not answer.text.endswith("\n"):
            print(flush=True)
        if answer.is_stopped:
            output.remark("(stopped)")
        elif self._is_cut:
            output.remark(f"(cut off: the context of {self.model} is full)")
        if answer.text:
            self._said.append({"role": "assistant", "content": answer.text})
        else:
            self._said.pop()
        return answer

    def _pieces(self, temperature: float | None) -> Iterator[str]:
        """The answer in pieces. Drops the oldest turns until the conversation fits, and waits while the model loads."""
        forgotten = 0
        deadline = time.monotonic() + LOAD_PATIENCE_SECONDS
        while True:
            started = False
            try:
                for piece in self._attempt(self._body(is_streaming=self._is_streaming, temperature=temperature)):
                    if not started and forgotten:
                        turns = "turn" if forgotten == 1 else f"{forgotten} turns"
                        output.remark(f"(dropped the oldest {turns}: the context of {self.model} is full)")
                    started = True
                    yield piece
                return
            except EnginehouseError as error:
                if started:
                    raise
                if _TOO_LONG.search(f"{error.code} {error.message}") and self._forget_oldest():
                    forgotten += 1
                    continue
                if not self._is_loading(error) or time.monotonic() > deadline:
                    raise
                with waiting(f"{self.model} is loading"):
                    time.sleep(min(10.0, error.retry_after_seconds or 1.0))

    def _is_loading(self, error: EnginehouseError) -> bool:
        """Whether the frontend answered that the model is loading and the request should be retried."""
        return isinstance(error, Unavailable) and "loading" in error.details

    def _forget_oldest(self) -> bool:
        """Drop the oldest question and its answer; False if only the last question is left."""
        if len(self._said) < 2:
            return False
        del self._said[0]
        while len(self._said) > 1 and self._said[0]["role"] != "user":
            del self._said[0]
        return True

    def _body(self, *, is_streaming: bool, temperature: float | None) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self.model,
            "messages": [*self._system, *self._said],
            "stream": is_streaming,
        }
        if temperature is not None:
            body["temperature"] = temperature
        return body

    def _attempt(self, body: dict[str, object]) -> Iterator[str]:
        return self._stream(body) if self._is_streaming else self._whole(body)

    def _whole(self, body: dict[str, object]) -> Iterator[str]:
        with waiting(f"{self.model} is thinking"):
            answer: Any = self._frontend.client.request("POST", PATH, body, object, timeout_seconds=ANSWER_SECONDS)
        try:
            choice = answer["choices"][0]
            self._is_cut = choice.get("finish_reason") == "length"
            yield choice["message"]["content"] or ""
        except (LookupError, TypeError, AttributeError) as error:
            raise Upstream("cannot read the answer: it contains no text", code="upstream_error") from error

    def _stream(self, body: dict[str, object]) -> Iterator[str]:
        with ExitStack() as stack:
            sign = stack.enter_context(ExitStack())
            sign.enter_context(waiting(f"{self.model} is thinking"))
            events = stack.enter_context(self._frontend.client.post_stream(PATH, body, silence_seconds=ANSWER_SECONDS))
            is_ended = False
            for event in events:
                if event.data == b"[DONE]":
                    return
                chunk = _decoded(event.data)
                if chunk.error is not None:
                    reason = chunk.error if isinstance(chunk.error, str) else chunk.error.message
                    raise Upstream(_sentence(reason), code="upstream_error")
                for choice in chunk.choices:
                    is_ended = is_ended or choice.finish_reason is not None
                    self._is_cut = self._is_cut or choice.finish_reason == "length"
                    if choice.delta.content:
                        sign.close()
                        yield choice.delta.content
            if not is_ended:
                raise Upstream("cannot finish the answer: the connection was lost; ask again", code="upstream_error")


def _decoded(payload: bytes) -> _Chunk:
    try:
        return msgspec.json.decode(payload, type=_Chunk)
    except msgspec.DecodeError as error:
        raise Upstream(f"cannot read the answer: {error}", code="upstream_error") from error


def _sentence(reason: str) -> str:
    return reason if reason.startswith("cannot ") else f"cannot finish the answer: {reason}"
