"""The command line as a whole: help, speed, and what ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from tests.cli.recorded import WAIT_SECONDS, Answer, Stream, environment, recorded

from enginehouse import __version__
from enginehouse.cli.main import COMMANDS, program
from enginehouse.cli.options.shared import CliCommand, CliGroup


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found, (*path, name))


ALL = dict(commands(program))


@pytest.mark.parametrize("path", list(ALL), ids=" ".join)
def test_every_command_has_help_with_an_example_that_names_it(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(program, [*path, "--help"])
    assert result.exit_code == 0
    examples = result.stdout.partition("Examples:\n")[2]
    assert " ".join(("enginehouse", *path)) in examples
    accepted = {name for parameter in ALL[path].params for name in parameter.opts}
    assert accepted >= {"--data", "--url", "--token", "--json"}
    commands = result.stdout.partition("Commands:\n")[2].partition("\n\n")[0]
    assert "..." not in commands, "a description is cut"


def test_help_offers_only_what_means_something_there() -> None:
    def offered(*path: str) -> str:
        return " ".join(CliRunner().invoke(program, [*path, "--help"]).stdout.partition("Examples:")[0].split())

    assert "--token" not in offered("frontend")
    assert "The frontend to talk to" not in offered("up")
    assert "--url" not in offered("local", "install")
    assert "--url URL The frontend to join, or several with commas" in offered("worker")
    assert "--token TOKEN The join token" in offered("join")
    assert "--url URL The frontend to talk to" in offered("backends", "list")


@pytest.mark.parametrize("path", list(ALL), ids=" ".join)
def test_every_example_is_accepted_by_the_command_it_shows(path: tuple[str, ...]) -> None:
    command = ALL[path]
    assert isinstance(command, CliCommand | CliGroup)
    import shlex

    for example in command.examples:
        words = shlex.split(example.partition("#")[0].partition("<")[0].partition(">")[0])
        words = words[words.index("enginehouse") + 1 :]
        depth = max(size for size in range(len(words) + 1) if tuple(words[:size]) in ALL)
        with ALL[tuple(words[:depth])].make_context("x", words[depth:], resilient_parsing=False):
            pass


def test_the_list_of_commands_says_what_their_own_help_says() -> None:
    for name, said in COMMANDS.items():
        own = (ALL[(name,)].help or "").splitlines()[0]
        known = {
            "run": "Chat with the model NAME;",
            "embed": "Print the vector of each TEXT",
            "join": "Join this machine to the server at URL",
        }
        assert own.startswith(known.get(name, said.rstrip("."))), name


def test_help_imports_nothing_that_is_slow() -> None:
    script = (
        "import sys; sys.argv = ['enginehouse', *sys.argv[1:]]\n"
        "from enginehouse.cli.main import program\n"
        "try: program.main()\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    for arguments in (["--help"], ["backends", "install", "--help"], ["up", "--help"], ["version"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=WAIT_SECONDS, check=True
        )
        loaded = {name.partition(".")[0] for name in done.stderr.split()}
        slow = {"rich", "textual", "sqlalchemy", "starlette", "uvicorn", "nats", "alembic", "asyncio", "yaml", "psutil"}
        assert not loaded & slow, arguments
        assert done.stdout


def test_the_version_is_shown() -> None:
    for arguments in (["version"], ["--version"]):
        assert CliRunner().invoke(program, arguments).stdout == f"enginehouse {__version__}\n"


def test_a_group_alone_shows_its_help() -> None:
    result = CliRunner().invoke(program, ["nodes"])
    assert result.exit_code == 2
    assert "approve" in result.stderr


def test_without_a_server_one_sentence_says_what_to_do(tmp_path: Path) -> None:
    result = CliRunner().invoke(program, ["nodes", "list", "--data", str(tmp_path)], env={"ENGINEHOUSE_URL": ""})
    assert result.exit_code == 4
    assert len(result.stderr.splitlines()) == 1
    assert "enginehouse up" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["up", "--port", "x"], "--port"),
        (["up", "--backend-install-timeout", "-5m"], "--backend-install-timeout"),
        (["frontend", "--heartbeat", "soon"], "--heartbeat"),
        (["frontend", "--nats-url", "nats://h", "--database-url", "mysql://h/d"], "--database-url"),
        (["frontend", "--nats-url", "nats://h", "--database-url", "cluster.db"], "--database-url"),
        (["frontend"], "--nats-url"),
        (["worker", "--url", "server:80"], "--url"),
        (["worker", "--url", "http://h", "--name", "a b"], "--name"),
        (["join", "server:8080"], "cannot join 'server:8080'"),
    ],
)
def test_a_bad_setting_is_refused_before_anything_starts(tmp_path: Path, arguments: list[str], named: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "enginehouse", *arguments, "--data", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert named in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_has_seen_enough_leaves_no_noise(tmp_path: Path) -> None:
    nodes = [{"id": str(number), "name": f"node-{number}", "platform": "x" * 500} for number in range(2000)]
    with recorded({"GET /api/nodes?limit=500": Answer(nodes)}) as world:
        reading, writing = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "enginehouse", "nodes", "list"],
            env=environment(world, tmp_path),
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(writing)
        os.read(reading, 100)
        os.close(reading)
        _, stderr = process.communicate(timeout=WAIT_SECONDS)
    assert stderr == ""
    assert process.returncode != 0


def test_ctrl_c_while_waiting_for_an_answer_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    held = threading.Event()

    def slow(request: object) -> Answer | Stream:
        held.wait(WAIT_SECONDS)
        return Answer([])

    with recorded({"GET /api/nodes?limit=500": slow}) as world:
        process = subprocess.Popen(
            [sys.executable, "-m", "enginehouse", "nodes", "list"],
            env=environment(world, tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        world.wait_for("/api/nodes")
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=WAIT_SECONDS)
        held.set()
    assert process.returncode == 130
    assert "Traceback" not in stderr


def test_the_manual_names_every_command_and_every_setting() -> None:
    from enginehouse.settings import programs as settings

    manual = Path(__file__).parents[2].joinpath("docs", "cli.md").read_text()
    for path in ALL:
        assert f"`{' '.join(path)}" in manual or len(path) == 0, path
    kinds = (settings.UpSettings, settings.FrontendSettings, settings.WorkerSettings, settings.LocalSettings)
    for kind in (*kinds, settings.ClientSettings):
        for field in ("data", *settings.fields_of(kind)):
            # Secrets of a cluster have no flag: a command line is there for every user of the machine to read.
            if field not in ("admin_token", "join_token"):
                assert f"`{settings.flag_of(field)}`" in manual, field
            assert f"`ENGINEHOUSE_{settings.setting_name(field).upper()}`" in manual, field
