"""Reads the documents: their lines of text, blocks of code, links and headings, as a reader on a web site sees them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"\s*(```|~~~)(\w*)")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_SPAN = re.compile(r"`([^`]+)`")


class Line(NamedTuple):
    file: Path
    number: int
    text: str
    language: str | None  # of the block of code that it is in; None outside of one

    @property
    def where(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.number}"


def documents() -> list[Path]:
    return sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))


def lines(file: Path) -> Iterator[Line]:
    language: str | None = None
    for number, text in enumerate(file.read_text().splitlines(), 1):
        if fence := _FENCE.match(text):
            language = None if language is not None else fence[2]
            continue
        yield Line(file, number, text, language)


def every_line() -> list[Line]:
    return [line for file in documents() for line in lines(file)]


def links(line: Line) -> list[str]:
    """What the links of a line lead to. Code has none."""
    return [] if line.language is not None else _LINK.findall(_SPAN.sub("", line.text))


def code(line: Line) -> list[str]:
    """The pieces of code in a line: the whole line within a block, else what is between backticks."""
    if line.language is not None:
        return [line.text]
    return _SPAN.findall(line.text)


def anchors(file: Path) -> set[str]:
    """The names of a document's headings in links: lower case, without punctuation, hyphens for spaces."""
    found: set[str] = set()
    for line in lines(file):
        if line.language is None and (heading := re.match(r"#+ (.+)", line.text)):
            plain = re.sub(r"[^\w\- ]", "", heading[1].lower())
            found.add(plain.replace(" ", "-"))
    return found
