"""What the documents name exists: files and headings behind links, commands, options, variables and metrics."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import yaml
from tests.documents.reading import ROOT, Line, anchors, code, documents, every_line, links

from enginehouse.cli.main import COMMANDS, program
from enginehouse.settings.programs import (
    FrontendSettings,
    LocalSettings,
    UpSettings,
    WorkerSettings,
    fields_of,
    setting_name,
)

PROGRAMS = (FrontendSettings, WorkerSettings, UpSettings, LocalSettings)
VARIABLES = {f"ENGINEHOUSE_{setting_name(field).upper()}" for kind in PROGRAMS for field in fields_of(kind)}
SOURCES = "\n".join(path.read_text() for path in sorted((ROOT / "src/enginehouse").rglob("*.py")))
FOR_TESTS = (ROOT / "Makefile").read_text()
_OPTION = re.compile(r"--[a-z][a-z-]*[a-z]|-[a-zA-Z]$")
# The beginning of a command in a text: the program, or a command of it with a further word.
_PROGRAM = re.compile(r"^(?:\$ )?(?:.*[;&|] )?(?:\w+=\S* )*(?:\.venv/bin/)?enginehouse\s+(?P<words>[^;&#`)]*)")
WIDTH = 120  # of a line of text
HISTORY = "CHANGELOG.md"  # names what existed in its time


def commands_in(line: Line) -> list[list[str]]:
    """The commands that a line names, each as its words after `enginehouse`."""
    found = [words_of(match["words"]) for text in code(line) if (match := _PROGRAM.match(text))]
    if line.language is None:
        first = [words_of(text) for text in code(line)]
        found += [words for words in first if len(words) > 1 and words[0] in COMMANDS and words[1] != "="]
    return [words for words in found if words]


def words_of(text: str) -> list[str]:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:  # the text ends within quotes: cut off, or a sentence with an apostrophe
        words = text.split()
    return [piece for word in words for piece in word.strip("[](),.:").split("|") if piece]


def unknown_in(words: list[str]) -> str:
    """What of a command does not exist; "" if all of it does."""
    command: click.Command = program
    context = click.Context(program, info_name="enginehouse")
    known = options_of(program)
    for word in words:
        name = word.partition("=")[0]
        if _OPTION.fullmatch(name) and name not in known:
            return f"`{name}` of `{context.command_path}`"
        if word.startswith("-") or word.isupper() or word == "…" or not isinstance(command, click.Group):
            continue
        try:
            _, found, _ = command.resolve_command(context, [word])
        except click.UsageError:
            return f"`{word}` of `{context.command_path}`"
        assert found is not None
        command, context = found, click.Context(found, parent=context, info_name=word)
        known |= options_of(command)
    return ""


def options_of(command: click.Command) -> set[str]:
    names = {
        name for one in command.params if isinstance(one, click.Option) for name in (*one.opts, *one.secondary_opts)
    }
    return names | {"--help", "-h"}


def every_command() -> list[str]:
    """The full names of all commands, without those of the program itself."""
    found = []
    for name in COMMANDS:
        command = program.get_command(click.Context(program), name)
        if isinstance(command, click.Group):
            found += [f"{name} {inner}" for inner in command.commands]
        else:
            found.append(name)
    return found


@pytest.mark.parametrize("file", documents(), ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(file: Path) -> None:
    dead = []
    for line in every_line():
        for target in links(line) if line.file == file else ():
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            aim = (file.parent / path).resolve() if path else file
            if not aim.exists() or (anchor and anchor not in anchors(aim)):
                dead.append(f"{line.where}: {target}")
    assert dead == []


def test_lines_of_text_are_wrapped() -> None:
    """Not those of tables and of code, and not a link or command that is as long by itself."""
    long = [
        line.where
        for line in every_line()
        if len(line.text) > WIDTH and line.language is None and not line.text.lstrip().startswith(("|", "#", "!"))
        if " " in re.sub(r"`[^`]+`|\[[^\]]*\]\([^)]*\)", "x", line.text.strip())
    ]
    assert long == []


def test_commands_and_options_that_are_named_exist() -> None:
    wrong = [
        f"{line.where}: {unknown}"
        for line in every_line()
        if line.file.name != HISTORY
        for words in commands_in(line)
        if (unknown := unknown_in(words))
    ]
    assert wrong == []


def test_the_check_of_commands_finds_what_does_not_exist() -> None:
    assert unknown_in(["nodes", "aprove", "attic"]) == "`aprove` of `enginehouse nodes`"
    assert unknown_in(["backends", "install", "llama-cpp", "--every"]) == "`--every` of `enginehouse backends install`"
    assert unknown_in(["node", "ls", "--json"]) == ""


def test_every_command_is_described() -> None:
    text = re.sub(r"\s+", " ", (ROOT / "docs/cli.md").read_text())
    assert [
        name for name in every_command() if not re.search(rf"`(enginehouse )?{name}\b|enginehouse {name}\b", text)
    ] == []


def test_variables_that_are_named_are_read_somewhere() -> None:
    unknown = {
        f"{line.where}: {name}"
        for line in every_line()
        if line.file.name != HISTORY
        for name in re.findall(r"\bENGINEHOUSE_[A-Z_]+[A-Z]", line.text)
        if name not in VARIABLES and name not in SOURCES + FOR_TESTS and not name.startswith("ENGINEHOUSE_CREDENTIAL_")
    }
    assert unknown == set()


def test_every_setting_has_its_row_in_the_table_of_settings() -> None:
    table = (ROOT / "docs/cli.md").read_text()
    assert sorted(name for name in VARIABLES if f"`{name}`" not in table) == []


def test_messages_that_are_explained_are_those_of_the_program() -> None:
    """Adjacent literals are joined, and what is filled in is written as `…` on both sides."""
    texts = re.sub(r'"\s*f?"', "", SOURCES)
    unknown = []
    for line in every_line():
        if line.file.name != "troubleshooting.md" or not line.text.startswith("| "):
            continue
        for message in code(line._replace(text=line.text.split(" | ")[0])):
            pieces = [piece.strip() for piece in message.split("…") if piece.strip()]
            unknown += [f"{line.where}: {piece}" for piece in pieces if piece not in texts]
    assert unknown == []


def test_every_alert_says_what_is_so_and_what_to_do() -> None:
    groups = yaml.safe_load((ROOT / "docs/alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) >= 10
    for rule in rules:
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert all(rule["annotations"][what] for what in ("summary", "action")), rule["alert"]
        assert "for" in rule, f"{rule['alert']}: a moment is no alert"
