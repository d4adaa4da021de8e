"""A small GBNF matcher and sampler, written from the description of the language and independent of our writer.

    grammar = Grammar(text); grammar.accepts('{"a":1}'); grammar.sample(random.Random(1))

It refuses left recursion and unknown names, which engines cannot work with either.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

MAX_SAMPLE_DEPTH = 24
_SIMPLE = {"n": "\n", "r": "\r", "t": "\t"}


@dataclass(frozen=True)
class Char:
    """One character of a class; each range is inclusive."""

    ranges: tuple[tuple[str, str], ...]
    is_negated: bool

    def takes(self, character: str) -> bool:
        return any(low <= character <= high for low, high in self.ranges) != self.is_negated


@dataclass(frozen=True)
class Name:
    name: str


@dataclass(frozen=True)
class Sequence:
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Either:
    options: tuple[Part, ...]


@dataclass(frozen=True)
class Repeated:
    part: Part
    least: int
    most: int | None


Part = Char | Name | Sequence | Either | Repeated


@dataclass
class _Reader:
    text: str
    position: int = 0

    def skip(self) -> None:
        while self.position < len(self.text) and self.text[self.position] in " \t":
            self.position += 1

    def either(self) -> Part:
        options = [self.sequence()]
        while self.text.startswith("|", self.position):
            self.position += 1
            options.append(self.sequence())
        return options[0] if len(options) == 1 else Either(tuple(options))

    def sequence(self) -> Part:
        parts: list[Part] = []
        self.skip()
        while self.position < len(self.text) and self.text[self.position] not in "|)":
            parts.append(self.repeated(self.one()))
            self.skip()
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def one(self) -> Part:
        character = self.text[self.position]
        if character == '"':
            self.position += 1
            letters = []
            while self.text[self.position] != '"':
                letter = self.letter()
                letters.append(Char(((letter, letter),), False))
            self.position += 1
            return Sequence(tuple(letters))
        if character == "[":
            return self.klass()
        if character == "(":
            self.position += 1
            inside = self.either()
            assert self.text[self.position] == ")", self.text[self.position :]
            self.position += 1
            return inside
        match = re.compile(r"[A-Za-z0-9-]+").match(self.text, self.position)
        assert match, self.text[self.position :]
        self.position = match.end()
        return Name(match.group())

    def klass(self) -> Char:
        self.position += 1
        is_negated = self.text[self.position] == "^"
        self.position += is_negated
        ranges = []
        while self.text[self.position] != "]":
            low = high = self.letter()
            if self.text[self.position] == "-" and self.text[self.position + 1] != "]":
                self.position += 1
                high = self.letter()
            ranges.append((low, high))
        self.position += 1
        return Char(tuple(ranges), is_negated)

    def letter(self) -> str:
        character = self.text[self.position]
        self.position += 1
        if character != "\\":
            return character
        escaped = self.text[self.position]
        self.position += 1
        if escaped == "x":
            self.position += 2
            return chr(int(self.text[self.position - 2 : self.position], 16))
        assert escaped in 'nrt\\"[]', f"unknown escape {escaped!r}"  # llama.cpp's own list
        return _SIMPLE.get(escaped, escaped)

    def repeated(self, part: Part) -> Part:
        match = re.compile(r"\*|\+|\?|\{(\d+)(,?)(\d*)\}").match(self.text, self.position)
        if not match:
            return part
        self.position = match.end()
        if match.group() in "*+?":
            return Repeated(part, 1 if match.group() == "+" else 0, 1 if match.group() == "?" else None)
        least = int(match.group(1))
        return Repeated(part, least, int(match.group(3)) if match.group(3) else None if match.group(2) else least)


@dataclass
class Grammar:
    text: str
    rules: dict[str, Part] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for line in self.text.splitlines():
            name, _, body = line.partition(" ::= ")
            assert name not in self.rules, f"{name} is there twice"
            reader = _Reader(body)
            self.rules[name] = reader.either()
            assert reader.position == len(body), f"cannot read {line!r} at {reader.position}"

    def accepts(self, text: str) -> bool:
        return len(text) in self._ends(self.rules["root"], text, 0, {}, set())

    def _ends(
        self, part: Part, text: str, start: int, known: dict[tuple[str, int], set[int]], open_: set[tuple[str, int]]
    ) -> set[int]:
        match part:
            case Char():
                return {start + 1} if start < len(text) and part.takes(text[start]) else set()
            case Name(name):
                key = (name, start)
                if key not in known:
                    assert key not in open_, f"{name} is left recursive"
                    open_.add(key)
                    known[key] = self._ends(self.rules[name], text, start, known, open_)
                    open_.discard(key)
                return known[key]
            case Sequence(parts):
                ends = {start}
                for one in parts:
                    ends = {end for begin in ends for end in self._ends(one, text, begin, known, open_)}
                return ends
            case Either(options):
                return {end for one in options for end in self._ends(one, text, start, known, open_)}
            case Repeated(inner, least, most):
                current, found = {start}, {start} if least == 0 else set()
                count = 0
                while current and (most is None or count < most):
                    count += 1
                    current = {end for begin in current for end in self._ends(inner, text, begin, known, open_)}
                    if count >= least:
                        current -= found
                        found |= current
                return found

    def sample(self, chance: random.Random) -> str:
        """A text of the grammar; RecursionError if the grammar leads ever deeper."""
        return self._sample(self.rules["root"], chance, 0)

    def _sample(self, part: Part, chance: random.Random, depth: int) -> str:
        if depth > MAX_SAMPLE_DEPTH * 8:
            raise RecursionError
        match part:
            case Char():
                letters = [chr(code) for code in (*range(32, 127), 9, 10, 233, 0x4E2D) if part.takes(chr(code))]
                return chance.choice(letters)
            case Name(name):
                return self._sample(self.rules[name], chance, depth + 1)
            case Sequence(parts):
                return "".join(self._sample(one, chance, depth + 1) for one in parts)
            case Either(options):
                # Deep down the last options are taken: scalars come last, containers first.
                chosen = options[-1] if depth > MAX_SAMPLE_DEPTH else chance.choice(options)
                return self._sample(chosen, chance, depth + 1)
            case Repeated(inner, least, most):
                upper = min(least + 3, most if most is not None else least + 3)
                count = least if depth > MAX_SAMPLE_DEPTH else chance.randint(least, upper)
                return "".join(self._sample(inner, chance, depth + 1) for _ in range(count))
