"""Go templates as texts and tokens: the first half of reading them.

Trim markers and comments are gone afterwards. A token knows its line, for messages, and whether white space precedes
it, because `.A.B` and `.A .B` differ.
"""

from __future__ import annotations

import re

from msgspec import Struct

from enginehouse.core.errors import Invalid

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<raw>`[^`]*`)
      | (?P<character>'(?:[^'\\\n]|\\.)+')
      | (?P<number>[+-]?(?:0[xX][0-9a-fA-F_]+ | (?:\d[\d_]*(?:\.\d*)? | \.\d+)(?:[eE][+-]?\d+)?))
      | (?P<variable>\$\w*)
      | (?P<field>\.[^\W\d]\w*)
      | (?P<word>[^\W\d]\w*)
      | (?P<symbol>:=|[=,|().])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{3})|(.))")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\\": "\\", '"': '"', "'": "'"}
_LEFT = re.compile(r"\{\{(?:-(?=[ \t\r\n]))?")
_COMMENT = re.compile(r"[ \t\r\n]*/\*(?:.*?)\*/(?:[ \t\r\n]+-)?\}\}", re.DOTALL)


class Token(Struct, frozen=True):
    kind: str
    text: str
    is_spaced: bool  # white space precedes it
    line: int


def fault(line: int, cause: str) -> Invalid:
    return Invalid(f"cannot use the template: line {line}: {cause}", code="invalid_template")


def pieces_of(text: str) -> list[str | list[Token]]:
    """Texts and actions in order. Trim markers have been applied."""
    pieces: list[str | list[Token]] = []
    position, line, trims = 0, 1, False
    while True:
        left = _LEFT.search(text, position)
        plain = text[position : left.start() if left else len(text)]
        lines = plain.count("\n")
        if trims:
            plain = plain.lstrip(" \t\r\n")
        if left and left.group().endswith("-"):
            plain = plain.rstrip(" \t\r\n")
        if plain:
            pieces.append(plain)
        if left is None:
            return pieces
        line += lines
        comment = _COMMENT.match(text, left.end())
        if comment:
            end = comment.end()
        else:
            tokens, end = _action(text, left.end(), line)
            pieces.append(tokens)
        trims = text[end - 3 : end] == "-}}"
        line += text.count("\n", left.start(), end)
        position = end


def _action(text: str, position: int, line: int) -> tuple[list[Token], int]:
    tokens: list[Token] = []
    is_spaced = False
    while True:
        if text.startswith("}}", position):
            return tokens, position + 2
        if is_spaced and text.startswith("-}}", position):
            return tokens, position + 3
        match = _TOKEN.match(text, position)
        if match is None:
            rest = text[position : position + 10]
            raise fault(line, f"{rest!r} is not understood" if rest else "an action is not closed with '}}'")
        kind = str(match.lastgroup)
        if kind != "space":
            tokens.append(Token(kind=kind, text=match.group(), is_spaced=is_spaced, line=line))
        is_spaced = kind == "space"
        line += match.group().count("\n")
        position = match.end()


def literal_of(token: Token) -> object:
    if token.kind == "raw":
        return token.text[1:-1].replace("\r", "")
    if token.kind == "number":
        digits = token.text.replace("_", "")
        if "x" in digits.lower():
            return int(digits, 16)
        return int(digits) if digits.lstrip("+-").isdigit() else float(digits)
    text = _ESCAPE.sub(lambda match: _unescape(match, token.line), token.text[1:-1])
    if token.kind == "string":
        return text
    if len(text) != 1:
        raise fault(token.line, f"{token.text} is not one character")
    return ord(text)


def _unescape(match: re.Match[str], line: int) -> str:
    hexadecimal = match.group(1) or match.group(2) or match.group(3)
    if hexadecimal or match.group(4):
        number = int(hexadecimal, 16) if hexadecimal else int(match.group(4), 8)
        if number < 0x110000 and not 0xD800 <= number < 0xE000:
            return chr(number)
    elif match.group(5) in _ESCAPED:
        return _ESCAPED[match.group(5)]
    raise fault(line, f"{match.group()!r} is not a known escape")
