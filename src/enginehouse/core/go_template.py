"""Renders Go templates, the language of prompts in LocalAI's model configurations.

    render("{{if .System}}{{.System}}\\n{{end}}{{.Input}}", TemplateRecord(System="", Input="hello"))

A template sees the values it is given and nothing else. It always ends: every step, every copied text and every
character of output is charged to a budget, so that no configuration can stall or fill a frontend.
"""

from __future__ import annotations

from typing import assert_never

from enginehouse.core.errors import Invalid
from enginehouse.core.template_functions import FUNCTIONS, TemplateFunction
from enginehouse.core.template_syntax import (
    BranchNode,
    Constant,
    FieldAccess,
    FunctionName,
    JumpNode,
    LoopNode,
    Node,
    Operand,
    OutputNode,
    Pipeline,
    SubPipeline,
    TextNode,
    VariableAccess,
    parse,
)
from enginehouse.core.template_tokens import fault
from enginehouse.core.template_values import TemplateRecord, kind_of, printed

MAX_STEPS = 200_000  # a fraction of a second; a prompt of a gallery's template takes some hundreds
MAX_OUTPUT = 64 * 1024 * 1024  # characters; a request may have 32 MiB, and a template may repeat them
MAX_TEXT = MAX_OUTPUT  # of one value
_PIPED_NOTHING = object()


def render(template: str, values: TemplateRecord | dict[str, object]) -> str:
    """The text that a template gives for plain values."""
    return _Rendering(values).text(parse(template))


def check(template: str) -> None:
    """Refuse a template that cannot be read, and one that calls unknown functions."""
    _check_functions(parse(template))


class _Jump(Exception):
    """`break` or `continue` on its way to the loop."""

    def __init__(self, word: str) -> None:
        self.word = word


class _Rendering:
    """One rendering: its variables, its output and what it may still spend."""

    def __init__(self, root: object) -> None:
        self._variables: list[tuple[str, object]] = [("$", root)]
        self._root = root
        self._pieces: list[str] = []
        self._steps = MAX_STEPS
        self._room = MAX_OUTPUT
        self._line = 1

    def text(self, nodes: tuple[Node, ...]) -> str:
        self._run(nodes, self._root)
        return "".join(self._pieces)

    def spend(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise fault(self._line, f"it takes more than {MAX_STEPS} steps")

    # Nodes ----------------------------------------------------------------------------------------------------------

    def _run(self, nodes: tuple[Node, ...], dot: object) -> None:
        for node in nodes:
            self.spend(1)
            match node:
                case TextNode(text=text):
                    self._write(text)
                case OutputNode(pipeline=pipeline):
                    value = self._value(pipeline, dot)
                    if not pipeline.variables:
                        self._write(printed(value, self))
                case BranchNode():
                    self._branch(node, dot)
                case LoopNode():
                    self._loop(node, dot)
                case JumpNode(word=word):
                    raise _Jump(word)
                case _:
                    assert_never(node)

    def _write(self, text: str) -> None:
        self._room -= len(text)
        if self._room < 0:
            raise fault(self._line, f"it gives more than {MAX_OUTPUT} characters")
        self._pieces.append(text)

    def _branch(self, node: BranchNode, dot: object) -> None:
        scope = len(self._variables)
        value = self._value(node.pipeline, dot)
        if value:
            self._run(node.then, value if node.sets_dot else dot)
        else:
            self._run(node.otherwise, dot)
        del self._variables[scope:]

    def _loop(self, node: LoopNode, dot: object) -> None:
        scope = len(self._variables)
        declared = node.pipeline.variables
        value = self._value(node.pipeline, dot)
        items = self._items(value)
        for key, item in items:
            self.spend(1)
            for name, one in zip(declared, (key, item) if len(declared) == 2 else (item,), strict=False):
                self._set(name, one)
            inner = len(self._variables)
            try:
                self._run(node.body, item)
            except _Jump as jump:
                if jump.word == "break":
                    break
            finally:
                del self._variables[inner:]
        if not items:
            self._run(node.otherwise, dot)
        del self._variables[scope:]

    def _items(self, value: object) -> list[tuple[object, object]]:
        if value is None:
            return []
        if isinstance(value, list):
            return list(enumerate(value))
        if isinstance(value, dict) and not isinstance(value, TemplateRecord):
            return [(key, value[key]) for key in sorted(value)]
        if isinstance(value, int) and not isinstance(value, bool):
            self.spend(max(0, value))
            return [(number, number) for number in range(value)]
        raise fault(self._line, f"range needs a list or a map, not a {kind_of(value)}")

    # Pipelines ------------------------------------------------------------------------------------------------------

    def _value(self, pipeline: Pipeline, dot: object) -> object:
        self._line = pipeline.line
        value: object = _PIPED_NOTHING
        for operands in pipeline.commands:
            value = self._command(operands, dot, value)
        if pipeline.assigns:
            for name in pipeline.variables:
                self._set(name, value)
        else:
            self._variables.extend((name, value) for name in pipeline.variables)
        return value

    def _set(self, name: str, value: object) -> None:
        for position in range(len(self._variables) - 1, -1, -1):
            if self._variables[position][0] == name:
                self._variables[position] = (name, value)
                return

    def _command(self, operands: tuple[Operand, ...], dot: object, piped: object) -> object:
        first = operands[0]
        if not isinstance(first, FunctionName):
            return self._operand(first, dot)
        return self._call(first.name, operands[1:], dot, piped)

    def _call(self, name: str, operands: tuple[Operand, ...], dot: object, piped: object) -> object:
        self.spend(1)
        if name in ("and", "or"):
            return self._choose(name, operands, dot, piped)
        fewest, most, function = _function(name, self._line)
        arguments = [self._operand(one, dot) for one in operands]
        if piped is not _PIPED_NOTHING:
            arguments.append(piped)
        if len(arguments) < fewest or (most is not None and len(arguments) > most):
            raise fault(self._line, f"{name} does not take {len(arguments)} arguments")
        try:
            value = function(self, arguments)
        except Invalid as error:
            cause = error.message.removeprefix("cannot use the template: ")
            raise error if cause.startswith("line ") else fault(self._line, f"{name}: {cause}") from None
        if isinstance(value, str) and len(value) > MAX_TEXT:
            raise fault(self._line, f"{name} gives more than {MAX_TEXT} characters")
        return value

    def _choose(self, name: str, operands: tuple[Operand, ...], dot: object, piped: object) -> object:
        """`and` and `or` give the first argument that decides, and leave out the others."""
        value: object = None
        for one in operands:
            value = self._operand(one, dot)
            if bool(value) == (name == "or"):
                return value
        if piped is not _PIPED_NOTHING:
            return piped
        if not operands:
            raise fault(self._line, f"{name} needs an argument")
        return value

    def _operand(self, operand: Operand, dot: object) -> object:
        self.spend(1)
        match operand:
            case Constant(value=value):
                return value
            case FieldAccess(names=names):
                return self._fields(dot, names)
            case VariableAccess(name=name, names=names):
                return self._fields(self._variable(name), names)
            case FunctionName(name=name):
                return self._call(name, (), dot, _PIPED_NOTHING)
            case SubPipeline(pipeline=pipeline, names=names):
                scope = len(self._variables)
                value = self._value(pipeline, dot)
                del self._variables[scope:]
                return self._fields(value, names)
            case _:
                assert_never(operand)

    def _variable(self, name: str) -> object:
        for known, value in reversed(self._variables):
            if known == name:
                return value
        raise fault(self._line, f"the variable {name} is not defined")

    def _fields(self, value: object, names: tuple[str, ...]) -> object:
        for name in names:
            self.spend(1)
            if isinstance(value, dict):
                if name not in value and isinstance(value, TemplateRecord):
                    raise fault(self._line, f"there is no field .{name}; known are {', '.join(value)}")
                value = value.get(name)
            elif value is not None:  # a field of nothing is nothing
                raise fault(self._line, f"a {kind_of(value)} has no field .{name}")
        return value


def _function(name: str, line: int) -> tuple[int, int | None, TemplateFunction]:
    found = FUNCTIONS.get(name)
    if found is None:
        raise fault(line, f"the function {name} is not supported")
    return found


def _check_functions(nodes: tuple[Node, ...]) -> None:
    for node in nodes:
        match node:
            case TextNode() | JumpNode():
                pass
            case OutputNode(pipeline=pipeline):
                _check_pipeline(pipeline)
            case (
                BranchNode(pipeline=pipeline, then=inner, otherwise=otherwise)
                | LoopNode(pipeline=pipeline, body=inner, otherwise=otherwise)
            ):
                _check_pipeline(pipeline)
                _check_functions(inner)
                _check_functions(otherwise)
            case _:
                assert_never(node)


def _check_pipeline(pipeline: Pipeline) -> None:
    for operands in pipeline.commands:
        for operand in operands:
            if isinstance(operand, FunctionName) and operand.name not in ("and", "or"):
                _function(operand.name, pipeline.line)
            elif isinstance(operand, SubPipeline):
                _check_pipeline(operand.pipeline)
