"""Programs that are kept running: what ends is started again, what hangs can be hurried, logs stay short."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from enginehouse.host import children, processes
from enginehouse.host.children import Child, ChildProgram, Ending, keep_short

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
)


def child(directory: Path, code: str) -> Child:
    program = ChildProgram("part", (sys.executable, "-c", code), dict(os.environ))
    return Child(program, directory, directory / "part.log")


async def until(what: str, probe: Callable[[], bool], limit_seconds: float = 20.0) -> None:
    try:
        async with asyncio.timeout(limit_seconds):
            while not probe():  # noqa: ASYNC110 - another process decides
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"waited {limit_seconds} s in vain for: {what}") from None


def text_of(log: Path) -> str:
    return log.read_text() if log.exists() else ""


async def test_a_child_that_does_not_stop_is_named_and_ctrl_c_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "PATIENCE_SECONDS", 0.2)
    one, ending, said = child(tmp_path, STUBBORN), Ending(), ""

    def is_named() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "part is still stopping" in said

    async with asyncio.timeout(children.STOP_SECONDS / 2), asyncio.TaskGroup() as group:
        group.create_task(one.run(lambda: None))
        await until("it to be deaf", lambda: "deaf" in text_of(tmp_path / "part.log"))
        ending.interrupt()
        ending.interrupt()
        assert not ending.hurried.is_set(), "a signal that was sent twice is one request"
        group.create_task(one.stop(ending))
        await until("somebody to say what is waited for", is_named)
        ending.interrupt()


async def test_a_child_ends_whoever_cannot_read_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    one = child(tmp_path, "print('here', flush=True)")
    with os.fdopen(writing, "w") as nobody:
        monkeypatch.setattr(sys, "stderr", nobody)
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            group.create_task(one.run(lambda: None))
            await until("a second start", lambda: text_of(tmp_path / "part.log").count("here") > 1)
            await one.stop(Ending())
        monkeypatch.undo()
        nobody.flush()  # as the interpreter does at its end: then it would be an error of the program


async def test_a_child_that_is_stopped_while_it_is_being_started_is_stopped_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made, go = processes.spawn, asyncio.Event(), asyncio.Event()

    async def spawn(argv: Sequence[str], **options: Any) -> asyncio.subprocess.Process:
        process = await real(argv, **options)
        made.set()
        await go.wait()
        return process

    monkeypatch.setattr(processes, "spawn", spawn)
    one = child(tmp_path, "import time; time.sleep(60)")
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(one.run(lambda: None))
        await made.wait()
        stopping = group.create_task(one.stop(Ending()))
        await until("the request to stop", one._stopping.is_set)
        go.set()
        await stopping


async def test_a_program_that_is_not_there_is_given_up_with_the_reason(tmp_path: Path) -> None:
    one = Child(ChildProgram("part", (str(tmp_path / "nothing"),), {}), tmp_path, tmp_path / "part.log")
    refused = asyncio.Event()
    async with asyncio.timeout(20):
        await one.run(refused.set)
    assert refused.is_set()
    assert one.refusal is not None
    assert one.refusal.message == "cannot start part: No such file or directory"


async def test_a_log_that_grows_is_cut_while_its_writer_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "LOG_LIMIT_BYTES", 100)
    monkeypatch.setattr(children, "LOG_LOOK_SECONDS", 0.01)
    log, small = tmp_path / "part.log", tmp_path / "small.log"
    small.write_text("small")
    with log.open("a") as writer:
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(keep_short([log, small, tmp_path / "absent.log"]))
            writer.write("old" * 50)
            writer.flush()
            await until("the log to be cut", lambda: log.stat().st_size == 0)
            keeping.cancel()
        writer.write("new")
    assert log.read_text() == "new"
    assert (tmp_path / "part.log.1").read_text() == "old" * 50
    assert small.read_text() == "small"
    assert not (tmp_path / "small.log.1").exists()
