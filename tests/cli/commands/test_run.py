"""`enginehouse run`: a model made ready, an answer, a chat."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.real_terminal import Terminal
from tests.cli.recorded import JOB, Answer, Reaction, Request, Stream, operation, recorded, refused, row, run

CHAT = "POST /v1/chat/completions"
MODELS = Answer([{"name": "tiny-chat", "options": {"system_prompt": "Be kind."}}])
READY: dict[str, Reaction | list[Reaction]] = {
    "POST /api/models/tiny-chat/load": Answer({"ready": True, "replicas": []}),
    "GET /api/models": MODELS,
}
ASK = ("run", "tiny-chat", "What is the capital of France?")


def piece(text: str, finish_reason: str | None = None) -> str:
    chunk = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]}
    return f"data: {json.dumps(chunk)}\n\n"


PARIS = Stream([piece("The capital "), piece("is Paris."), piece("", "stop"), "data: [DONE]\n\n"])


def test_a_prompt_is_answered_once_on_stdout_alone(tmp_path: Path) -> None:
    with recorded({**READY, CHAT: PARIS}) as world:
        result = run(world, tmp_path, *ASK)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "The capital is Paris.\n", "")
    assert world.bodies("/v1/chat/completions") == [
        {
            "model": "tiny-chat",
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "What is the capital of France?"},
            ],
            "stream": True,
            "temperature": 0.0,
        }
    ]


def test_the_steps_of_a_load_are_shown_on_stderr_before_the_answer(tmp_path: Path) -> None:
    steps = ("install llama-cpp", "place the files of tiny-chat", "start tiny-chat")
    states = [
        operation("running", *(row("main", "success", action=step) for step in steps[:done]),
                  row("main", action=steps[done], intent=steps[done]), kind="load")
        for done in range(3)
    ]  # fmt: skip
    done = operation("succeeded", *(row("main", "success", action=step) for step in steps), kind="load")
    answers = {
        **READY,
        "POST /api/models/tiny-chat/load": Answer(operation("queued", kind="load"), 202),
        f"GET /api/events?operation={JOB}": Stream([("operation", state) for state in [*states, done]]),
        CHAT: PARIS,
    }
    with recorded(answers) as world:
        result = run(world, tmp_path, *ASK, "--node", "main")
    assert result.stdout == "The capital is Paris.\n"
    for step in steps:
        assert f"main: {step}: working" in result.stderr
        assert f"✓ main: {step}" in result.stderr
    assert world.bodies("/api/models/tiny-chat/load") == [{"node": "main"}]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (operation("failed", error="cannot place tiny-chat: no node"), 1),
        (operation("queued", row("main", "queued", reason="node_away"), isParked=True), 4),
    ],
)
def test_without_the_model_there_is_no_chat(tmp_path: Path, end: dict[str, object], code: int) -> None:
    with recorded({**READY, "POST /api/models/tiny-chat/load": Answer(end, 202), CHAT: PARIS}) as world:
        result = run(world, tmp_path, *ASK)
    assert result.exit_code == code
    assert "enginehouse: cannot chat with tiny-chat" in result.stderr
    assert result.stdout == ""


def test_an_unknown_model_is_the_frontends_sentence(tmp_path: Path) -> None:
    answer = refused(404, "cannot find a model named 'tiny-chat'", "model_not_found")
    with recorded({"POST /api/models/tiny-chat/load": answer}) as world:
        result = run(world, tmp_path, *ASK)
    assert result.exit_code == 5
    assert result.stderr == "enginehouse: cannot find a model named 'tiny-chat'\n"


def test_a_token_that_may_only_use_models_can_chat_too(tmp_path: Path) -> None:
    denied = refused(403, "cannot do this with the role user", "forbidden")
    with recorded({"POST /api/models/tiny-chat/load": denied, CHAT: PARIS}) as world:
        assert run(world, tmp_path, *ASK).stdout == "The capital is Paris.\n"
        assert run(world, tmp_path, *ASK, "--node", "main").exit_code == 4


def test_in_a_pipe_the_question_comes_from_stdin(tmp_path: Path) -> None:
    with recorded({**READY, CHAT: PARIS}) as world:
        assert run(world, tmp_path, "run", "tiny-chat", stdin="Where?\n").stdout == "The capital is Paris.\n"
        assert run(world, tmp_path, "run", "tiny-chat", stdin=" \n").exit_code == 2
        assert run(world, tmp_path, "run", "tiny-chat", "--prompt", "").exit_code == 2
        assert run(world, tmp_path, "run", "tiny-chat", "--prompt", "Where?").stdout == "The capital is Paris.\n"
        assert run(world, tmp_path, *ASK, "--prompt", "Where?").exit_code == 2


def test_without_streaming_the_answer_comes_whole(tmp_path: Path) -> None:
    whole = {"choices": [{"message": {"role": "assistant", "content": "Paris."}, "finish_reason": "stop"}]}
    with recorded({**READY, CHAT: Answer(whole)}) as world:
        assert run(world, tmp_path, *ASK, "--no-stream").stdout == "Paris.\n"
        assert json.loads(run(world, tmp_path, *ASK, "--json").stdout) == whole
    assert [body["stream"] for body in world.bodies("/v1/chat/completions")] == [False, False]


@pytest.mark.parametrize(
    ("stream", "sentence"),
    [
        (Stream([piece("The ca")], "cut"), "cannot reach the frontend"),
        (Stream([piece("The ca")]), "cannot finish the answer: the connection was lost"),
        (
            Stream([piece("The ca"), 'data: {"error":{"message":"cannot go on: the engine ended"}}\n\n']),
            "cannot go on: the engine ended",
        ),
        (Stream([piece("The ca"), "data: {\n\n"]), "cannot read the answer"),
    ],
)
def test_an_answer_that_breaks_is_told_in_one_sentence_and_exit_code_one(
    tmp_path: Path, stream: Stream, sentence: str
) -> None:
    with recorded({**READY, CHAT: stream}) as world:
        result = run(world, tmp_path, *ASK)
    assert result.exit_code == 1
    assert result.stdout == "The ca\n"
    assert len(result.stderr.splitlines()) == 1
    assert sentence in result.stderr


def test_an_answer_that_reached_the_end_of_the_memory_says_so(tmp_path: Path) -> None:
    with recorded({**READY, CHAT: Stream([piece("Once"), piece("", "length"), "data: [DONE]\n\n"])}) as world:
        result = run(world, tmp_path, *ASK)
    assert (result.exit_code, result.stdout) == (0, "Once\n")
    assert result.stderr == "(cut off: the context of tiny-chat is full)\n"


def test_a_model_that_is_still_loading_is_waited_for(tmp_path: Path) -> None:
    loading = refused(503, "cannot answer yet: tiny-chat is still loading", "model_loading", loading={"state": "x"})
    with recorded({**READY, CHAT: [loading, PARIS]}) as world:
        assert run(world, tmp_path, *ASK).stdout == "The capital is Paris.\n"


def test_what_a_model_says_cannot_steer_the_terminal(tmp_path: Path) -> None:
    with recorded({**READY, CHAT: Stream([piece("a\x1b[2Jb\n\tc"), "data: [DONE]\n\n"])}) as world:
        assert run(world, tmp_path, *ASK).stdout == "a[2Jb\n\tc\n"


def remembering(limit: int) -> Callable[[Request], Answer | Stream]:
    """An engine whose context holds `limit` messages."""

    def answer(request: Request) -> Answer | Stream:
        count = len(request.body["messages"])
        if count > limit:
            message = f"request ({count} tokens) exceeds the available context size ({limit} tokens)"
            return refused(400, message, "exceed_context_size_error")
        return Stream([piece(f"answer to {count}"), piece("", "stop"), "data: [DONE]\n\n"])

    return answer


def test_a_chat_remembers_forgets_and_ends(tmp_path: Path) -> None:
    with recorded({**READY, CHAT: remembering(100)}) as world:
        with Terminal(world, tmp_path, "run", "tiny-chat") as terminal:
            terminal.wait_for("tiny-chat is ready")
            terminal.type("one\n")
            terminal.wait_for("answer to 2")
            terminal.type("two\n")
            terminal.wait_for("answer to 4")
            terminal.type("/help\n")
            terminal.wait_for("/bye")
            terminal.type("/sytem\n")
            terminal.wait_for("there is no command /sytem")
            terminal.type("/clear\n")
            terminal.wait_for("cleared the conversation")
            terminal.type("three\n")
            terminal.wait_for("answer to 2")
            terminal.type("/bye\n")
            assert terminal.exit_code() == 0
    said = [message["content"] for message in world.bodies("/v1/chat/completions")[1]["messages"]]
    assert said == ["Be kind.", "one", "answer to 2", "two"]
    assert "temperature" not in world.bodies("/v1/chat/completions")[0]


def test_a_line_that_only_begins_with_a_slash_is_a_question(tmp_path: Path) -> None:
    with recorded({**READY, CHAT: PARIS}) as world:
        with Terminal(world, tmp_path, "run", "tiny-chat") as terminal:
            terminal.wait_for("tiny-chat is ready")
            for line in ("/etc/passwd\n", "/ is a slash\n", " /bie\n"):
                terminal.type(line)
                terminal.wait_for("The capital is Paris.")
            terminal.type("/exit\n")
            assert terminal.exit_code() == 0
    asked = [body["messages"][-1]["content"] for body in world.bodies("/v1/chat/completions")]
    assert asked == ["/etc/passwd", "/ is a slash", "/bie"]


@pytest.mark.parametrize(("system", "first"), [("Talk.", {"role": "system", "content": "Talk."}), ("", None)])
def test_instructions_replace_those_of_the_model(tmp_path: Path, system: str, first: dict[str, str] | None) -> None:
    with recorded({**READY, CHAT: PARIS}) as world:
        result = run(world, tmp_path, *ASK, "--system", system)
    assert result.exit_code == 0
    question = {"role": "user", "content": "What is the capital of France?"}
    assert world.bodies("/v1/chat/completions")[0]["messages"] == [*([first] if first else []), question]


def test_an_empty_prompt_is_refused_in_four_words(tmp_path: Path) -> None:
    with recorded(READY) as world:
        result = run(world, tmp_path, "run", "tiny-chat", "  ")
    assert (result.exit_code, result.stderr) == (2, "enginehouse: The prompt is empty.\n")


def test_a_conversation_that_no_longer_fits_loses_its_oldest_turns_with_one_remark(tmp_path: Path) -> None:
    with recorded({**READY, CHAT: remembering(4)}) as world, Terminal(world, tmp_path, "run", "tiny-chat") as terminal:
        for number, expected in ((1, "answer to 2"), (2, "answer to 4")):
            terminal.type(f"question {number}\n")
            terminal.wait_for(expected)
        terminal.type("question 3\n")
        terminal.wait_for("dropped the oldest turn")
        terminal.wait_for("answer to 4")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.exit_code() == 0
    said = [message["content"] for message in world.bodies("/v1/chat/completions")[-1]["messages"]]
    assert said == ["Be kind.", "question 2", "answer to 4", "question 3"]


def test_a_single_question_that_does_not_fit_is_told(tmp_path: Path) -> None:
    with recorded({**READY, CHAT: remembering(1)}) as world:
        result = run(world, tmp_path, *ASK)
    assert result.exit_code == 2
    assert "exceeds the available context size" in result.stderr


def test_ctrl_c_stops_the_answer_and_not_the_chat(tmp_path: Path) -> None:
    held = threading.Event()
    answers: dict[str, Reaction | list[Reaction]] = {
        **READY,
        CHAT: [Stream([piece("Once upon a time")], held), PARIS],
    }
    with recorded(answers) as world, Terminal(world, tmp_path, "run", "tiny-chat") as terminal:
        terminal.type("a story\n")
        terminal.wait_for("Once upon a time")
        terminal.interrupt()
        terminal.wait_for("(stopped)")
        held.set()
        terminal.type("capital?\n")
        terminal.wait_for("The capital is Paris.")
        terminal.wait_for("> ")
        assert terminal.interrupt_at_the_prompt() == 0
    said = [message["content"] for message in world.bodies("/v1/chat/completions")[1]["messages"]]
    assert said == ["Be kind.", "a story", "Once upon a time", "capital?"]


def test_a_broken_answer_does_not_end_the_chat_and_is_not_asked_twice(tmp_path: Path) -> None:
    answers: dict[str, Reaction | list[Reaction]] = {
        **READY,
        CHAT: [refused(502, "cannot reach the engine", "upstream_error"), PARIS],
    }
    with recorded(answers) as world, Terminal(world, tmp_path, "run", "tiny-chat") as terminal:
        terminal.type("one\n")
        terminal.wait_for("enginehouse: cannot reach the engine")
        terminal.type("two\n")
        terminal.wait_for("The capital is Paris.")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.exit_code() == 0
    assert [one["content"] for one in world.bodies("/v1/chat/completions")[1]["messages"]] == ["Be kind.", "two"]
