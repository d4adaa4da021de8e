"""`enginehouse gallery`: what it shows of galleries, without any server."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.cli.recorded import Answer, recorded
from tests.cli.recorded import run as ask
from tests.core.localai import INDEX, needs_index
from tests.fetch.galleries.gallery_server import serving

from enginehouse.cli.main import program
from enginehouse.cli.options.galleries import named_sources
from enginehouse.core.gallery_source import LOCALAI

SMALL = """
- {name: tool, description: "Digs.", capabilities: {nvidia-cuda-12: cuda12-tool, default: cpu-tool}}
- {name: cpu-tool, uri: "h/tool:cpu", mirrors: ["m/tool:cpu"], alias: spade, license: MIT}
- {name: cuda12-tool, uri: "h/tool:cuda-12", alias: spade}
- {name: tool-development, capabilities: {default: cpu-tool}}
- {name: gpu-only, capabilities: {nvidia: cuda12-tool}}
- {name: xllamacpp, uri: h/other}
- {name: ../bad}
"""
MACHINE = ("--capability", "default", "--platform", "linux/amd64")


def run(tmp_path: Path, *arguments: str, environment: dict[str, str] | None = None) -> Result:
    clean = {"ENGINEHOUSE_DATA": str(tmp_path / "data"), **(environment or {})}
    return CliRunner().invoke(program, ["gallery", *arguments], env=clean)


@pytest.fixture
def small(tmp_path: Path) -> tuple[str, ...]:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL)
    return ("--gallery", str(file))


def as_json(tmp_path: Path, *arguments: str) -> Any:
    result = run(tmp_path, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_list_holds_what_can_be_installed_here_and_says_how_much_more_there_is(
    tmp_path: Path, small: tuple[str, ...]
) -> None:
    result = run(tmp_path, "list", *small, *MACHINE)
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert [row[:3] for row in rows] == [
        ["llama-cpp", "xllamacpp", "enginehouse"],
        ["llama-cpp-grpc", "llama-cpp-grpc", "enginehouse"],
        ["minilm", "minilm", "enginehouse"],
        ["tool", "cpu-tool", "small"],
    ]
    assert rows[-1][3] == "Digs."
    assert "8 of 10 entries can be installed here: capability default (given), linux/amd64" in result.stderr
    assert "--all" in result.stderr


def test_the_whole_list_has_the_reason_where_something_cannot_be_installed(
    tmp_path: Path, small: tuple[str, ...]
) -> None:
    result = run(tmp_path, "list", "--all", *small, *MACHINE)
    rows = {line.split("\t")[0]: line.split("\t") for line in result.stdout.splitlines()}
    assert len(rows) == 10
    assert rows["small@xllamacpp"][1] == "xllamacpp"
    assert "needs an NVIDIA graphics card" in rows["cuda12-tool"][3]
    assert "none for default" in rows["gpu-only"][3]
    told = as_json(tmp_path, "list", "--all", *small, *MACHINE)
    assert [state["skipped"][0]["entry"] for state in told["galleries"]] == ["../bad"]
    assert len(told["entries"]) == 10


def test_a_choice_is_shown_with_why(tmp_path: Path, small: tuple[str, ...]) -> None:
    result = run(tmp_path, "resolve", "tool", *small, "--capability", "nvidia-cuda-12")
    facts = dict(line.split("\t") for line in result.stdout.splitlines())
    assert facts["build"] == "cuda12-tool"
    assert facts["why"] == "capability nvidia-cuda-12 → key nvidia-cuda-12 → cuda12-tool"
    told = as_json(tmp_path, "resolve", "small@tool", *small, *MACHINE)
    assert told["resolved"]["directory"] == "cpu-tool"
    assert told["resolved"]["mirrors"] == ["m/tool:cpu"]
    assert told["resolved"]["digest"] == ""
    assert as_json(tmp_path, "resolve", "spade", *small, *MACHINE)["resolved"]["directory"] == "cpu-tool"


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("gpu-only", 1, "gpu-only has builds for nvidia, none for default"),
        ("cuda12-tool", 1, "needs an NVIDIA graphics card"),
        ("nothing", 5, "cannot find a backend named 'nothing'"),
        ("elsewhere@tool", 5, "cannot find"),
        ("../x", 2, "cannot use '../x'"),
    ],
)
def test_a_name_without_a_build_ends_with_every_reason(
    tmp_path: Path, small: tuple[str, ...], name: str, code: int, told: str
) -> None:
    result = run(tmp_path, "resolve", name, *small, *MACHINE)
    assert (result.exit_code, result.stdout) == (code, "")
    assert told in result.stderr


def test_an_entry_is_shown_whole_with_what_this_machine_would_get(tmp_path: Path, small: tuple[str, ...]) -> None:
    shown = run(tmp_path, "show", "tool", *small, *MACHINE).stdout
    for line in ("kind\tmeta", "for default\tcpu-tool", "for nvidia-cuda-12\tcuda12-tool", "here\tcpu-tool"):
        assert line in shown
    shown = run(tmp_path, "show", "cpu-tool", *small, *MACHINE).stdout
    for line in ("uri\th/tool:cpu", "mirror\tm/tool:cpu", "alias\tspade", "license\tMIT"):
        assert line in shown
    assert "here\tnone\nwhy\tcannot install gpu-only" in run(tmp_path, "show", "gpu-only", *small, *MACHINE).stdout
    assert len(as_json(tmp_path, "show", "spade", *small, *MACHINE)["found"]) == 2
    assert run(tmp_path, "show", "nothing", *small).exit_code == 5


def test_the_capability_of_this_machine_can_be_forced(tmp_path: Path, small: tuple[str, ...]) -> None:
    forced = {"ENGINEHOUSE_CAPABILITY": "nvidia-cuda-12"}
    result = run(tmp_path, "resolve", "tool", *small, environment=forced)
    assert "build\tcuda12-tool" in result.stdout
    assert "capability\tnvidia-cuda-12 (forced by ENGINEHOUSE_CAPABILITY)" in result.stdout


def test_galleries_come_from_the_setting_and_a_copy_serves_when_the_source_is_gone(tmp_path: Path) -> None:
    with serving() as server:
        server.documents["/i.yaml"] = SMALL.encode()
        galleries = json.dumps([{"name": "net", "url": server.url("/i.yaml")}])
        flags = ("--backend-galleries", galleries, *MACHINE)
        refused = run(tmp_path, "resolve", "tool", *flags)
        assert (refused.exit_code, server.asked) == (5, [])
        assert "the gallery net is missing" in refused.stderr
        # Once, not with every command.
        assert "is missing" not in run(tmp_path, "resolve", "tool", *flags).stderr
        first = run(tmp_path, "resolve", "tool", *flags, "--allow-host", server.host)
        assert "gallery\tnet" in first.stdout
        assert len(server.take()) == 1
        assert run(tmp_path, "resolve", "tool", *flags).exit_code == 0
        assert server.asked == []
    away = {"LOCALAI_BACKEND_GALLERIES": galleries}
    assert "gallery\tnet" in run(tmp_path, "resolve", "tool", *MACHINE, environment=away).stdout
    assert run(tmp_path, "resolve", "tool", "--backend-galleries", "[]").exit_code == 5
    bad = run(tmp_path, "list", "--backend-galleries", "{}")
    assert (bad.exit_code, bad.stdout) == (2, "")
    assert "--backend-galleries" in bad.stderr


def test_galleries_given_by_path_or_address_get_names_of_their_own() -> None:
    sources = named_sources(("a/index.yaml", "https://h/index.yaml", LOCALAI.mirrors[0], "/x/enginehouse.yaml", "/.y"))
    assert [source.name for source in sources] == ["index", "index-2", "index-3", "enginehouse-2", "gallery"]
    assert sources[0].url == f"file://{Path.cwd()}/a/index.yaml"


def test_the_offers_of_a_server_begin_with_what_is_installed_and_leave_out_what_fits_no_node(tmp_path: Path) -> None:
    def offer(name: str, **fields: object) -> dict[str, object]:
        return {"name": name, "gallery": "far", "fits": True, **fields}

    offers = [
        offer("llama-cpp", gallery="enginehouse"),
        offer("llama-cpp", stale=True),
        offer("tool-development", is_development=True),
        offer("cpu-tool", is_variant=True),
        offer("gpu-only", fits=False),
        offer("cpu-spade", is_variant=True, installed=True, description="Digs\n deep."),
    ]
    with recorded({"GET /backends/available": Answer(offers)}) as world:
        short = ask(world, tmp_path, "backends", "available")
        whole = ask(world, tmp_path, "backends", "available", "--all")
    rows = [line.split("\t") for line in short.stdout.splitlines()]
    assert [row[0] for row in rows] == ["cpu-spade", "llama-cpp", "far@llama-cpp"]
    assert rows[0][1:] == ["installed", "", "", "Digs deep."]
    assert "stale galleries: far" in short.stderr
    assert "3 more with --all" in short.stderr
    assert len(whole.stdout.splitlines()) == len(offers)
    assert "gpu-only\tno node" in whole.stdout
    assert "--all" not in whole.stderr


@needs_index
def test_a_thousand_entries_on_a_terminal_take_one_line_each(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "enginehouse", "gallery", "list", "--gallery", str(INDEX), *MACHINE],
        env={**os.environ, "ENGINEHOUSE_DATA": str(tmp_path), "TERM": "xterm", "COLUMNS": "120"},
        stdin=slave,
        stdout=slave,
        stderr=subprocess.PIPE,
    )
    os.close(slave)
    seen = b""
    while True:
        try:
            received = os.read(master, 65536)
        except OSError:  # Linux's way to say that the other side has closed
            break
        if not received:
            break
        seen += received
    _, remarks = process.communicate(timeout=20)
    os.close(master)
    lines = seen.decode().splitlines()
    assert process.returncode == 0
    assert 65 <= len(lines) <= 80
    assert "BUILD HERE" in lines[0]
    assert b"--all shows all 1032" in remarks
