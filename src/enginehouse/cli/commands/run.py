"""`enginehouse run`: loads a model, with progress on stderr, then chats with it, with answers on stdout."""

from __future__ import annotations

import contextlib
import re
import sys

import click

from enginehouse.cli.client.chat import Conversation
from enginehouse.cli.client.connect import FrontendApi, connect, read
from enginehouse.cli.client.follow import follow
from enginehouse.cli.client.selectors import selector_option
from enginehouse.cli.commands.models import is_ready, place_for, request_load
from enginehouse.cli.options.shared import command, given, wants_json
from enginehouse.cli.terminal import output
from enginehouse.core.errors import Denied, Hopeless, Invalid, Unavailable
from enginehouse.core.name import check_model_name
from enginehouse.core.views import ModelView, OperationView

CHAT_HELP = "/clear starts a new conversation, /bye or Ctrl-D ends the chat, Ctrl-C stops an answer"
_COMMAND = re.compile(r"/[A-Za-z?]+\s*")  # one word: a path or a sentence that begins with a slash is a question


@command(
    "run",
    examples=(
        "enginehouse run tiny-chat",
        'enginehouse run tiny-chat "What is the capital of France?"',
        'enginehouse run smollm2 --system "You are a pirate."',
        "echo 'What is the capital of France?' | enginehouse run tiny-chat",
    ),
)
@click.argument("name")
@click.argument("question", required=False)
@click.option("--prompt", metavar="TEXT", help="The same as QUESTION.")
@click.option("--system", metavar="TEXT", help="Instructions for the model instead of its own; an empty text for none.")
@click.option("--node", metavar="NODE", help="Load the model on this node.")
@selector_option
@click.option("--no-stream", is_flag=True, help="Show the answer when it is complete.")
def entry(
    name: str,
    question: str | None,
    prompt: str | None,
    system: str | None,
    node: str | None,
    selectors: tuple[str, ...],
    no_stream: bool,
) -> int:
    """Chat with the model NAME; installs and starts what it needs.

    With QUESTION it answers that and ends; the same question gives the same answer. In a pipe, the question is read
    from stdin. In the chat, Ctrl-C stops an answer, Ctrl-D or /bye ends the chat, /help lists the commands.
    """
    check_model_name(name)
    if question is not None and prompt is not None:
        raise click.UsageError("give the question once: as an argument or with --prompt")
    given()  # reads a token from stdin before the question is read from there
    question = _question(prompt if question is None else question)
    frontend = connect()
    own = make_ready(frontend, name, place_for(frontend, name, node, selectors))
    conversation = Conversation(
        frontend, name, own if system is None else system, is_streaming=not (no_stream or wants_json())
    )
    if question is not None:
        return _answer_once(conversation, question)
    return _chat(conversation)


def _question(prompt: str | None) -> str | None:
    """The question to answer once, or None for a chat."""
    if prompt is None:
        if sys.stdin.isatty():
            if wants_json():
                raise Invalid("cannot chat in JSON: give the question as an argument", code="invalid_setting")
            return None
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise Invalid("The prompt is empty.", code="invalid_setting", param="prompt")
    return prompt


def make_ready(frontend: FrontendApi, name: str, node: str | None) -> str:
    """Load the model and show the progress; its system prompt. A user token cannot: its first question loads it."""
    try:
        answer = request_load(frontend, name, node)
    except Denied:
        if node is not None:
            raise
        return ""
    # Requested while the model loads, so that it costs no time.
    models = read(frontend.get("/api/models"), tuple[ModelView, ...])
    if not is_ready(answer):
        _check_loaded(follow(frontend, answer, outcome_to="stderr"), name)
    return next((model.options.system_prompt for model in models if model.name == name), "")


def _check_loaded(operation: OperationView, name: str) -> None:
    if operation.isParked:
        # `follow` has shown the reason, and that the load continues by itself.
        raise Unavailable(f"cannot chat with {name} yet: the load waits for a node", code="resource_exhausted")
    if operation.status != "succeeded":
        raise Hopeless(
            f"cannot chat with {name}: the load {operation.status}; "
            f"`enginehouse ops show {operation.jobID}` has the details"
        )


def _answer_once(conversation: Conversation, question: str) -> int:
    if wants_json():
        output.emit_json(conversation.complete(question))
        return 0
    answer = conversation.ask(question, temperature=0.0)
    if answer.failure is not None:
        if not answer.text:
            raise answer.failure
        # Part of the answer was printed, so the exit code is that of a failure, whatever the error.
        output.remark(f"enginehouse: {answer.failure.message}")
        return 1
    return 130 if answer.is_stopped else 0


def _chat(conversation: Conversation) -> int:
    output.remark(f"{conversation.model} is ready. /help lists the commands, Ctrl-D ends the chat.")
    while True:
        try:
            line = _read_line()
        except (KeyboardInterrupt, EOFError):
            print(file=sys.stderr)
            return 0
        match line.strip():
            case "":
                continue
            case "/bye" | "/exit" | "/quit":
                return 0
            case "/clear":
                conversation.clear()
                output.remark("cleared the conversation")
            case "/help" | "/?":
                output.remark(CHAT_HELP)
            case word if _COMMAND.fullmatch(line):
                output.remark(f"there is no command {word}. /help lists them; with a space before it, it is a question")
            case question:
                failure = conversation.ask(question).failure
                if failure is not None:
                    output.remark(f"enginehouse: {failure.message}")


def _read_line() -> str:
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # importing it adds history and editing to `input`
        return input("> ")
    # stdout is redirected and holds the answers only, so the prompt goes to stderr.
    sys.stderr.write("> ")
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
