"""Reads Go templates: text with actions in double braces becomes a tree.

The language is the part of Go's `text/template` that model configurations use: conditions, loops, `with`, pipelines,
variables, literals, fields and functions. Templates within templates (`define`, `template`, `block`) and calls of
methods do not exist here. A fault is `Invalid` and names the line.
"""

from __future__ import annotations

from functools import lru_cache

from msgspec import Struct

from enginehouse.core.errors import Invalid
from enginehouse.core.template_tokens import Token, fault, literal_of, pieces_of

MAX_TEMPLATE = 256 * 1024  # characters
MAX_NESTING = 64  # of blocks and parentheses; the evaluation recurses as deep
CACHED_TEMPLATES = 512

_UNSUPPORTED = frozenset({"define", "template", "block"})


class Constant(Struct, frozen=True):
    value: object


class FieldAccess(Struct, frozen=True):
    """`.A.B`; without names it is the dot itself."""

    names: tuple[str, ...]


class VariableAccess(Struct, frozen=True):
    """`$x.A.B`; the name contains the dollar sign, and `$` alone is the root."""

    name: str
    names: tuple[str, ...]


class FunctionName(Struct, frozen=True):
    name: str


class SubPipeline(Struct, frozen=True):
    """A pipeline in parentheses, and fields of its value."""

    pipeline: Pipeline
    names: tuple[str, ...]


Operand = Constant | FieldAccess | VariableAccess | FunctionName | SubPipeline


class Pipeline(Struct, frozen=True):
    """Commands that each pass their value on as the last argument of the next."""

    line: int
    commands: tuple[tuple[Operand, ...], ...]
    variables: tuple[str, ...] = ()
    assigns: bool = False  # to variables that exist, instead of declaring them


class TextNode(Struct, frozen=True):
    text: str


class OutputNode(Struct, frozen=True):
    pipeline: Pipeline


class BranchNode(Struct, frozen=True):
    """`if` and `with`."""

    sets_dot: bool
    pipeline: Pipeline
    then: tuple[Node, ...]
    otherwise: tuple[Node, ...]


class LoopNode(Struct, frozen=True):
    pipeline: Pipeline
    body: tuple[Node, ...]
    otherwise: tuple[Node, ...]


class JumpNode(Struct, frozen=True):
    """`break` or `continue`."""

    word: str


Node = TextNode | OutputNode | BranchNode | LoopNode | JumpNode


@lru_cache(maxsize=CACHED_TEMPLATES)
def parse(text: str) -> tuple[Node, ...]:
    """The tree of a template. Trees of equal texts are shared."""
    if len(text) > MAX_TEMPLATE:
        raise Invalid(
            f"cannot use the template: it has {len(text)} characters, at most {MAX_TEMPLATE} are allowed",
            code="invalid_template",
        )
    return _Parser(pieces_of(text)).parse()


class _Parser:
    """Recursive descent over pieces (blocks) and the tokens of one action (pipelines)."""

    def __init__(self, pieces: list[str | list[Token]]) -> None:
        self._pieces = pieces
        self._next_piece = 0
        self._tokens: list[Token] = []
        self._next_token = 0
        self._line = 1
        self._nesting = 0
        self._loops = 0
        # Variables in scope. Each is known when it is used, so a typing error is found before the first request.
        self._variables = ["$"]

    def parse(self) -> tuple[Node, ...]:
        nodes, end = self._block()
        if end is not None:
            raise fault(self._line, f"'{end}' has no beginning")
        return nodes

    # Blocks ---------------------------------------------------------------------------------------------------------

    def _block(self) -> tuple[tuple[Node, ...], str | None]:
        """Nodes up to `end` or `else`, which are returned; None at the end of the template."""
        nodes: list[Node] = []
        while self._next_piece < len(self._pieces):
            piece = self._pieces[self._next_piece]
            self._next_piece += 1
            if isinstance(piece, str):
                nodes.append(TextNode(piece))
                continue
            self._tokens, self._next_token = piece, 0
            if piece:
                self._line = piece[0].line
            word = self._take_word()
            if word in ("end", "else"):
                if word == "end":
                    self._close()
                return tuple(nodes), word
            nodes.append(self._node(word))
        return tuple(nodes), None

    def _node(self, word: str) -> Node:
        if word == "if":
            return self._branch(sets_dot=False)
        if word == "with":
            return self._branch(sets_dot=True)
        if word == "range":
            return self._loop()
        if word in ("break", "continue"):
            self._close()
            if not self._loops:
                raise fault(self._line, f"'{word}' outside of a range")
            return JumpNode(word)
        if word in _UNSUPPORTED:
            raise fault(self._line, f"'{word}' is not supported")
        pipeline = self._pipeline()
        self._close()
        return OutputNode(pipeline)

    def _branch(self, *, sets_dot: bool) -> BranchNode:
        scope = self._enter()
        pipeline = self._pipeline()
        self._close()
        then, end = self._block()
        otherwise: tuple[Node, ...] = ()
        if end == "else":
            word = self._take_word()
            if word in ("if", "with"):
                # The chained branch consumes the one `end` of the whole.
                otherwise = (self._branch(sets_dot=word == "with"),)
                end = "end"
            else:
                self._close()
                otherwise, end = self._block()
        self._leave(scope, end)
        return BranchNode(sets_dot=sets_dot, pipeline=pipeline, then=then, otherwise=otherwise)

    def _loop(self) -> LoopNode:
        scope = self._enter()
        pipeline = self._pipeline(most_variables=2)
        self._close()
        self._loops += 1
        body, end = self._block()
        self._loops -= 1
        otherwise: tuple[Node, ...] = ()
        if end == "else":
            self._close()
            otherwise, end = self._block()
        self._leave(scope, end)
        return LoopNode(pipeline=pipeline, body=body, otherwise=otherwise)

    def _enter(self) -> int:
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise fault(self._line, f"it is nested deeper than {MAX_NESTING}")
        return len(self._variables)

    def _leave(self, scope: int, end: str | None) -> None:
        if end != "end":
            raise fault(self._line, "a block has no 'end'" if end is None else "a second 'else'")
        self._nesting -= 1
        del self._variables[scope:]

    # Pipelines ------------------------------------------------------------------------------------------------------

    def _pipeline(self, most_variables: int = 1) -> Pipeline:
        line = self._line
        variables, assigns = self._declaration(most_variables)
        commands = [self._command()]
        while self._take("symbol", "|"):
            commands.append(self._command())
        for operands in commands[1:]:
            if not isinstance(operands[0], FunctionName):
                raise fault(line, "a value after '|' must be a function")
        if not assigns:
            self._variables.extend(variables)
        return Pipeline(line=line, commands=tuple(commands), variables=variables, assigns=assigns)

    def _declaration(self, most_variables: int) -> tuple[tuple[str, ...], bool]:
        start, names = self._next_token, []
        while (token := self._take("variable")) is not None:
            names.append(token.text)
            if len(names) < most_variables and self._take("symbol", ","):
                continue
            if self._take("symbol", ":="):
                return tuple(names), False
            if self._take("symbol", "="):
                for name in names:
                    self._check_variable(name)
                return tuple(names), True
            break
        self._next_token = start
        return (), False

    def _command(self) -> tuple[Operand, ...]:
        operands: list[Operand] = []
        while (token := self._peek()) is not None and token.text not in ("|", ")"):
            if operands and not token.is_spaced and token.text != "(":
                raise fault(self._line, f"a space is missing before {token.text!r}")
            operands.append(self._operand())
        if not operands:
            raise fault(self._line, "a value is missing")
        if len(operands) > 1 and not isinstance(operands[0], FunctionName):
            raise fault(self._line, "only a function takes arguments")
        return tuple(operands)

    def _operand(self) -> Operand:
        token = self._tokens[self._next_token]
        self._next_token += 1
        if token.kind == "variable":
            self._check_variable(token.text)
            return VariableAccess(name=token.text, names=self._names())
        if token.kind == "field":
            return FieldAccess((token.text[1:], *self._names()))
        if token.text == "." and token.kind == "symbol":
            return FieldAccess(())
        if token.kind == "word":
            return _word(token)
        if token.text == "(" and token.kind == "symbol":
            scope = self._enter()
            pipeline = self._pipeline()
            if self._take("symbol", ")") is None:
                raise fault(self._line, "a parenthesis is not closed")
            self._leave(scope, "end")
            return SubPipeline(pipeline=pipeline, names=self._names())
        if token.kind in ("string", "raw", "character", "number"):
            return Constant(literal_of(token))
        raise fault(self._line, f"{token.text!r} is not expected here")

    def _names(self) -> tuple[str, ...]:
        names = []
        while (token := self._peek()) is not None and token.kind == "field" and not token.is_spaced:
            self._next_token += 1
            names.append(token.text[1:])
        return tuple(names)

    def _check_variable(self, name: str) -> None:
        if name not in self._variables:
            raise fault(self._line, f"the variable {name} is not defined")

    def _peek(self) -> Token | None:
        return self._tokens[self._next_token] if self._next_token < len(self._tokens) else None

    def _take(self, kind: str, text: str = "") -> Token | None:
        token = self._peek()
        if token is None or token.kind != kind or (text and token.text != text):
            return None
        self._next_token += 1
        return token

    def _take_word(self) -> str:
        """The key word that an action begins with, or ""."""
        token = self._peek()
        words = ("if", "else", "end", "range", "with", "break", "continue")
        if token is None or token.kind != "word" or token.text not in (*words, *_UNSUPPORTED):
            return ""
        self._next_token += 1
        return token.text

    def _close(self) -> None:
        token = self._peek()
        if token is not None:
            raise fault(self._line, f"{token.text!r} is not expected here")


def _word(token: Token) -> Operand:
    constants = {"true": True, "false": False, "nil": None}
    return Constant(constants[token.text]) if token.text in constants else FunctionName(token.text)
