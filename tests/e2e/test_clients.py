"""Clients that people use, against both kinds of engine: OpenAI's own, LangChain's chat model, and the command `llm`.

Both engines have the same model, so at temperature 0 the texts must be the same whichever way a request takes.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr
from tests.e2e.conftest import Cluster

HTTP, GRPC, VECTORS = "tiny-chat", "tiny-chat-grpc", "minilm"
BOTH = (HTTP, GRPC)
FRANCE = "What is the capital of France?"
PARIS = "The capital of France is Paris."
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def token(cluster: Cluster) -> str:
    """Of an application; all models are loaded."""
    for name in (*BOTH, VECTORS):
        cluster.cli("models", "load", name)
    return str(cluster.json("tokens", "create", "--role", "user", "--name", "application")["token"])


@pytest.fixture
def client(cluster: Cluster, token: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=token, max_retries=0, timeout=60) as made:
        yield made


def asked(question: str) -> Any:
    """The messages of a chat; the SDK has a type for each role."""
    return [{"role": "user", "content": question}]


@pytest.mark.parametrize("model", BOTH)
def test_openai_s_client_gets_an_answer_with_its_usage(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, temperature=0, messages=asked(FRANCE))
    assert answer.model == model
    assert answer.choices[0].message.content == PARIS
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 20


def test_every_way_gives_the_same_text_at_temperature_zero(client: openai.OpenAI) -> None:
    questions = (FRANCE, "Tell me a story about a robot.", "What is a control plane?", "What is two plus three?")
    for question in questions:
        texts = {
            client.chat.completions.create(model=model, temperature=0, messages=asked(question))
            .choices[0]
            .message.content
            for model in BOTH
        }
        assert len(texts) == 1, (question, texts)


@pytest.mark.parametrize("model", BOTH)
def test_a_stream_has_the_same_text_and_a_usage_trailer(client: openai.OpenAI, model: str) -> None:
    stream = client.chat.completions.create(
        model=model,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        messages=asked(FRANCE),
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == PARIS
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 5
    assert not any(chunk.usage for chunk in chunks[:-1])


@pytest.mark.parametrize("model", BOTH)
def test_a_client_that_leaves_a_stream_is_no_harm_to_the_next(client: openai.OpenAI, model: str) -> None:
    for _ in range(3):
        stream = client.chat.completions.create(
            model=model, stream=True, messages=asked("Tell me a story about a fox.")
        )
        next(iter(stream))
        stream.close()
    answer = client.chat.completions.create(model=model, temperature=0, messages=asked(FRANCE))
    assert answer.choices[0].message.content == PARIS


@pytest.mark.parametrize("model", BOTH)
def test_the_asynchronous_client_asks_twenty_at_once(cluster: Cluster, token: str, model: str) -> None:
    async def ask_all() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=token, max_retries=0, timeout=60) as made:

            async def one() -> str | None:
                answer = await made.chat.completions.create(model=model, temperature=0, messages=asked(FRANCE))
                return str(answer.choices[0].message.content)

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one()) for _ in range(20)]
        return [task.result() for task in tasks]

    assert asyncio.run(ask_all()) == [PARIS] * 20


class Verdict(BaseModel):
    answer: bool


@pytest.mark.parametrize("model", BOTH)
def test_structured_output_has_the_structure(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model,
        temperature=0,
        max_tokens=60,
        messages=asked("Is Paris a city?"),
        response_format=Verdict,
    )
    assert isinstance(answer.choices[0].message.parsed, Verdict)


@pytest.mark.parametrize("model", BOTH)
def test_tools_are_taken_and_the_answer_has_a_known_shape(client: openai.OpenAI, model: str) -> None:
    """A toy of 2 MB calls no tools by itself; what is forced to is in `tests/engine/localai`."""
    answer = client.chat.completions.create(
        model=model,
        temperature=0,
        max_tokens=60,
        messages=asked("What is the weather in Paris?"),
        tools=[TOOL],
    )
    message = answer.choices[0].message
    assert message.content or message.tool_calls


@pytest.mark.parametrize("model", BOTH)
def test_logprobs_stop_and_several_choices(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        temperature=0,
        n=2,
        logprobs=True,
        top_logprobs=2,
        stop=[" is"],
        messages=asked(FRANCE),
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {choice.message.content for choice in answer.choices} == {"The capital of France"}
    logprobs = answer.choices[-1].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert (logprobs.content[0].token, len(logprobs.content[0].top_logprobs)) == ("The", 2)


@pytest.mark.parametrize("model", BOTH)
def test_completions_continue_a_text(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="The capital of", max_tokens=4, temperature=0)
    assert answer.object == "text_completion"
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("model", BOTH)
def test_a_text_becomes_tokens_and_the_tokens_the_text(client: openai.OpenAI, model: str) -> None:
    asked_for: dict[str, object] = {"model": model, "content": FRANCE}
    tokens = client.post("/tokenize", body=asked_for, cast_to=dict[str, Any])["tokens"]
    assert len(tokens) > 3
    asked_for = {"model": model, "tokens": tokens}
    assert client.post("/detokenize", body=asked_for, cast_to=dict[str, Any])["content"].strip() == FRANCE


def test_embeddings_of_similar_sentences_are_near(client: openai.OpenAI) -> None:
    sentences = ["A man is eating food.", "A man is eating a piece of bread.", "The girl is carrying a baby."]
    answer = client.embeddings.create(model=VECTORS, input=sentences)
    first, second, third = (one.embedding for one in answer.data)
    assert len(first) == 384
    near = sum(x * y for x, y in zip(first, second, strict=True))
    far = sum(x * y for x, y in zip(first, third, strict=True))
    # What the model's authors publish for these sentences.
    assert near == pytest.approx(0.7553, abs=0.002)
    assert far < 0.0


def test_a_request_that_an_engine_cannot_do_says_so_before_its_first_byte(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.embeddings.create(model=GRPC, input="x")
    assert caught.value.status_code == 422
    assert "does not support it" in caught.value.message
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(model=GRPC, messages=asked("word " * 3000))
    assert too_long.value.code == "context_length_exceeded"


def test_langchain_s_chat_model_answers_and_streams(cluster: Cluster, token: str) -> None:
    made = [
        ChatOpenAI(
            model=model,
            base_url=f"{cluster.url}/v1",
            api_key=SecretStr(token),
            temperature=0,
            max_retries=0,
            timeout=60,
        )
        for model in BOTH
    ]
    try:
        for chat in made:
            assert chat.invoke([HumanMessage(FRANCE)]).content == PARIS
            assert "".join(str(piece.content) for piece in chat.stream([HumanMessage(FRANCE)])) == PARIS
    finally:
        # They share one connection pool, and one that is left to the collector is a warning.
        made[0].root_client.close()
        asyncio.run(made[0].root_async_client.close())


@pytest.mark.parametrize("model", BOTH)
def test_a_third_party_command_line_answers(cluster: Cluster, token: str, tmp_path: Path, model: str) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(
        json.dumps(
            [{"model_id": "fleet", "model_name": model, "api_base": f"{cluster.url}/v1", "api_key_name": "fleet"}]
        )
    )
    (tmp_path / "keys.json").write_text(json.dumps({"fleet": token}))
    done = subprocess.run(
        [str(Path(sys.executable).with_name("llm")), "-m", "fleet", "-o", "temperature", "0", FRANCE],
        env={**os.environ, "LLM_USER_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == PARIS
