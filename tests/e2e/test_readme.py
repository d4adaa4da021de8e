"""The README's commands, as they stand there, in their order, with what they are said to print.

Names that a reader has and a test has not are replaced (address, data directory, host name); numbers, ids and bars of
what is printed may differ. What needs a machine, a hub or a registry outside is left out by name, in `LEFT_OUT`.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.core.localai import INDEX
from tests.documents.reading import ROOT
from tests.e2e.conftest import FAST, wait_for
from tests.ports import free_port, ports_in_a_row

README = ROOT / "README.md"
LIMIT_SECONDS = 120.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Programs that run until they are ended, and what each has printed when the next command may come.
LASTING = {"make up": "Ctrl-C stops", "enginehouse join ": "waits for approval"}
LEFT_OUT = {
    "/join.sh": "another machine, which tests/e2e/test_second_machine.py has",
    "hf:": "no hub",
    "phi-2.yaml": "a file of the reader's",
    "quay.io/acme": "no such registry",
    "local rollback": "follows the install that is left out",
    "make test": "this test is a part of it",
}


class Command(NamedTuple):
    text: str
    output: list[str]


class Walk:
    """A checkout with the README's working directory, a data directory and ports of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.address = f"127.0.0.1:{free_port()}"
        self._data = root / "share"
        self._lasting: list[subprocess.Popen[bytes]] = []
        for name in ("Makefile", "src", "tools", "requirements", "pyproject.toml", ".venv"):
            (root / name).symlink_to(ROOT / name)
        # What a prepared machine has, an installed `enginehouse` too, which is another program than the checkout's.
        (root / "bin").mkdir()
        for tool in (ROOT / ".venv" / "bin").iterdir():
            if os.access(tool, os.X_OK):
                # Not a link: a Python finds its packages by the directory that it is called in.
                (root / "bin" / tool.name).write_text(f'#!/bin/sh\nexec {tool} "$@"\n')
                (root / "bin" / tool.name).chmod(0o755)
        shutil.copy(next((ROOT / "src/enginehouse/gallery").rglob("*.gguf")), root / "mine.gguf")
        galleries = f'[{{"name": "localai", "url": "{INDEX.as_uri()}"}}]' if INDEX.exists() else "[]"
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("ENGINEHOUSE_")},
            "PATH": f"{root}/bin:{os.environ['PATH']}",
            "XDG_DATA_HOME": str(self._data),
            "ENGINEHOUSE_BACKEND_GALLERIES": galleries,
            "ENGINEHOUSE_MODEL_GALLERIES": "[]",
            "ENGINEHOUSE_PORT": self.address.rpartition(":")[2],
            "ENGINEHOUSE_NATS_PORT": str(free_port()),
            "ENGINEHOUSE_NAME": "box",
            "ENGINEHOUSE_CANARY": "1s",
            **{f"ENGINEHOUSE_{flag[2:].upper()}": value for flag, value in zip(FAST[::2], FAST[1::2], strict=True)},
        }

    def here(self, text: str) -> str:
        """What the README says, in the names of this machine."""
        return text.replace("127.0.0.1:8080", self.address).replace("/home/you/.local/share", str(self._data))

    def there(self, text: str) -> str:
        """What was printed, in the names of the README."""
        known = {str(self._data): "/home/you/.local/share", str(self.root / "second"): "/tmp/second"}
        for ours, theirs in (*known.items(), (self.address, "127.0.0.1:8080"), (socket.gethostname(), "box")):
            text = text.replace(ours, theirs)
        return text

    def run(self, command: Command) -> str:
        environment = {**self._environment, "ENGINEHOUSE_BASE_PORT": str(ports_in_a_row())}
        if command.text.startswith("enginehouse join"):
            environment["ENGINEHOUSE_DATA"] = str(self.root / "second")
            del environment["ENGINEHOUSE_NAME"]
        if ready := is_lasting(command):
            return self._begin(command, environment, ready)
        code, output = on_terminal(self.here(command.text), self.root, environment)
        assert code == 0, f"{command.text}: {code}\n{output}"
        return self.there(output)

    def _begin(self, command: Command, environment: dict[str, str], ready: str) -> str:
        log = self.root / f"{len(self._lasting)}.log"
        with log.open("wb") as output:
            self._lasting.append(
                subprocess.Popen(
                    ["bash", "-c", f"exec {self.here(command.text)}"],
                    cwd=self.root,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        wait_for(f"{ready!r} of {command.text}", lambda: ready in log.read_text(), LIMIT_SECONDS)
        return self.there(log.read_text())

    def printed(self, number: int) -> str:
        """What the lasting program of that number has printed until now."""
        return self.there((self.root / f"{number}.log").read_text())

    def end(self) -> None:
        for process in reversed(self._lasting):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does: `make` waits for its child
            process.wait(60)


def commands() -> list[Command]:
    """The commands of the README's blocks, each with the lines that it is said to print."""
    found: list[Command] = []
    for block in re.findall(r"```console\n(.*?)```", README.read_text(), re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(Command(line[2:], []))
            elif found and found[-1].text.count("'") % 2:
                found[-1] = Command(f"{found[-1].text}\n{line}", [])
            else:
                found[-1].output.append(line)
    return [
        Command(one.text.partition("  # ")[0].strip(), [line for line in one.output if line])
        for one in found
        if not any(part in one.text for part in LEFT_OUT)
    ]


def on_terminal(text: str, directory: Path, environment: dict[str, str]) -> tuple[int, str]:
    """The exit code of a command and what a terminal of 140 columns showed of it."""
    master, slave = pty.openpty()
    shown = b""
    with subprocess.Popen(
        ["bash", "-c", text],
        cwd=directory,
        env={**environment, "TERM": "xterm-256color", "COLUMNS": "140", "LINES": "40"},
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
    ) as process:
        os.close(slave)
        deadline = time.monotonic() + LIMIT_SECONDS
        try:
            while select.select([master], [], [], max(deadline - time.monotonic(), 0))[0]:
                if not (read := _read(master)):
                    break
                shown += read
            else:
                process.kill()
        finally:
            os.close(master)
    return process.returncode, _ESCAPES.sub("", shown.decode()).replace("\r", "\n")


def _read(master: int) -> bytes:
    try:
        return os.read(master, 65536)
    except OSError:  # the last program that had the other end has closed it
        return b""


def is_lasting(command: Command) -> str:
    """What a lasting program has printed when it is ready; "" for a command that ends."""
    return next((ready for text, ready in LASTING.items() if command.text.startswith(text)), "")


def shape(line: str) -> str:
    """A line without what differs from run to run: numbers, ids, bars, and the width of columns."""
    line = re.sub(r"\b(?=\w*\d)[0-9a-f]{8}(-[0-9a-f]{4}){0,3}(-[0-9a-f]{12})?\b", "0", line)
    line = re.sub(r"\b[0-9a-f]{4}(-[0-9a-f]{4}){3}\b", "0", line)
    line = re.sub(r"login/\S+", "login/…", line)
    line = re.sub(r"\s*━.*", "", line)
    line = re.sub(r"\d+(\.\d+)?", "0", line)
    return re.sub(r"\s+", " ", line).strip()


def is_printed(line: str, output: str) -> bool:
    """Whether one line of the output has the shape of `line`; `…` stands for anything."""
    parts = [re.escape(part.strip()) for part in shape(line).split("…")]
    wanted = re.compile(r".*?".join(parts))
    return any(wanted.match(shape(given)) for given in output.splitlines())


def is_exact(line: str) -> bool:
    """Not what is seen only on a terminal while it moves, or in a first `make`."""
    return not line.startswith(("installing ", "⠦", "1 of 2 done"))


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    made = Walk(tmp_path_factory.mktemp("readme"))
    try:
        yield made
    finally:
        made.end()


def test_every_command_of_the_readme_does_and_prints_what_it_says(walk: Walk) -> None:
    said: list[tuple[Command, str]] = []
    for command in commands():
        if "localai@" in command.text and not INDEX.exists():
            continue
        said.append((command, walk.run(command)))
    assert len(said) > 15
    lasting = iter(range(len(said)))
    missing = []
    for command, output in said:
        whole = walk.printed(next(lasting)) if is_lasting(command) else output
        absent = [line for line in command.output if is_exact(line) and not is_printed(line, whole)]
        missing += [f"{command.text}\nprints no\n{line}\nbut\n{whole}" for line in absent]
    assert not missing, "\n".join(missing)


def test_the_python_of_the_readme_streams_an_answer(walk: Walk) -> None:
    block = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert block is not None
    reading = "\nprint(''.join(chunk.choices[0].delta.content or '' for chunk in stream if chunk.choices))\n"
    program = walk.here(block[1]) + reading
    done = subprocess.run([ROOT / ".venv/bin/python", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 3


def test_a_line_that_was_not_printed_is_noticed() -> None:
    assert is_printed("✓ box: install llama-cpp    ━━━━━━ done", "✓ box: install llama-cpp\n")
    assert is_printed("d55d2de0  load tiny-chat  succeeded  3/3  1s", "0aaaaaa1 load tiny-chat succeeded 3/3 12s")
    assert not is_printed("✓ second: install llama-cpp", "✓ box: install llama-cpp\n")
