"""The grammar of tool calls, for models whose prompts are rendered here.

A call is `{"name": "…", "arguments": {…}}`; a configuration may rename the keys, allow several calls or free text.
Unless the caller demands a call, a function that does nothing but answer is offered too, because a grammar would
otherwise force a call.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from enginehouse.core.errors import Invalid
from enginehouse.core.json_grammar import GrammarWriter, SchemaRules, json_literal, literal
from enginehouse.core.model_config import ToolConfig, ToolGrammarConfig

ANSWER = "answer"


class ToolFunction(Struct, frozen=True, kw_only=True):
    """One function that a model may call."""

    name: str
    description: str = ""
    parameters: dict[str, object] = {}
    strict: bool = False


def answer_name(config: ToolConfig) -> str:
    """The name of the function that stands for an ordinary answer."""
    return config.no_action_function_name or ANSWER


def answer_function(config: ToolConfig) -> ToolFunction:
    return ToolFunction(
        name=answer_name(config),
        description=config.no_action_description_name or "use this action to answer without performing any action",
        parameters={
            "type": "object",
            "properties": {"message": {"type": "string", "description": "The message to reply the user with"}},
            "required": ["message"],
        },
    )


def tool_grammar(functions: Sequence[ToolFunction], config: ToolConfig) -> str:
    """The grammar of calls of these functions."""
    if not functions:
        raise Invalid("cannot make a grammar of tool calls: the request has no tools", code="unsupported")
    writer = GrammarWriter()
    calls = [_call(writer, number, function, config) for number, function in enumerate(functions)]
    call = writer.rule(" | ".join(calls))
    return writer.text(_arranged(writer, call, config.grammar))


def _call(writer: GrammarWriter, number: int, function: ToolFunction, config: ToolConfig) -> str:
    schema = function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
    arguments = SchemaRules(writer, schema, f"tools[{number}].function.parameters").root()
    inside = writer.rule(arguments)
    if config.grammar.schema_type == "llama3.1":
        return writer.rule(f"{literal(f'<function={function.name}>')} {inside} {literal('</function>')}")
    name_key = config.function_name_key or "name"
    arguments_key = config.function_arguments_key or "arguments"
    pairs = {
        name_key: f'{json_literal(name_key)} ws ":" ws {json_literal(function.name)}',
        arguments_key: f'{json_literal(arguments_key)} ws ":" ws {inside}',
    }
    order = [one.strip() for one in config.grammar.properties_order.split(",")]
    keys = sorted(pairs, key=lambda key: order.index(key) if key in order else len(order))
    return writer.rule('"{" ws ' + ' ws "," ws '.join(pairs[key] for key in keys) + ' ws "}"')


def _arranged(writer: GrammarWriter, call: str, config: ToolGrammarConfig) -> str:
    """One call or several, after a prefix, and free text where it is allowed."""
    body = call
    if config.parallel_calls and config.schema_type == "llama3.1":
        body = writer.rule(f"{call} ( ws {call} )*")
    elif config.parallel_calls:
        separator = '"," ws' if config.disable_parallel_new_lines else 'ws "," ws'
        body = writer.rule(f'{call} | "[" ws {call} ( {separator} {call} )* ws "]"')
    if config.prefix:
        body = writer.rule(f"{literal(config.prefix)} {body}")
    if config.expect_strings_after_json:
        body = writer.rule(f"{body} ( [^{{\\[] [^\\x00]* )?")
    if config.mixed_mode and not config.no_mixed_free_string:
        # Free text does not begin as a call does.
        body = writer.rule(f"{body} | [^{{\\[<] [^\\x00]*")
    return body
