"""`enginehouse usage`: requests and tokens of the last days, summed by token, model, node or time."""

from __future__ import annotations

import time

import click

from enginehouse.cli.answers import ListedUsage, UsageAnswer
from enginehouse.cli.client.connect import connect, read
from enginehouse.cli.options.shared import command, emit_json
from enginehouse.cli.terminal import output

_GROUPINGS = ("token", "model", "node", "day", "hour")
_DAY_SECONDS = 86400


@command("usage", examples=("enginehouse usage", "enginehouse usage --by model --by day --days 30"))
@click.option(
    "--by",
    "groupings",
    type=click.Choice(_GROUPINGS),
    multiple=True,
    help="What to sum by: token and model if not given; repeatable.",
)
@click.option("--days", type=click.IntRange(1, 400), default=7, show_default=True, help="How far back.")
def entry(groupings: tuple[str, ...], days: int) -> None:
    """Show what was used, by token, model and node.

    Requests refused for a limit are not among them. With a user token, what that token used.
    """
    by = [one for one in _GROUPINGS if one in groupings] or ["token", "model"]
    since = _now() - days * _DAY_SECONDS
    answer = connect().get(f"/api/usage?from={since}&by={','.join(by)}")
    if emit_json(answer):
        return
    found = read(answer, UsageAnswer)
    rows = [[*(getattr(one, name) or "-" for name in by), *_amounts(one)] for one in found.usage]
    columns = [*(name.upper() for name in by), "REQUESTS", "ERRORS", "PROMPT TOKENS", "COMPLETION TOKENS"]
    output.emit_table(columns, rows, f"nothing was used in the last {days} days")
    if found.truncated:
        output.remark(f"only the first {len(rows)} rows are shown; sum by less, or take fewer days")
    if len(rows) > 1:
        named = zip(_amounts(found.total), ("requests", "errors", "prompt tokens", "completion tokens"), strict=True)
        output.remark("in all: " + ", ".join(f"{count} {what}" for count, what in named))


def _now() -> int:
    return int(time.time())


def _amounts(one: ListedUsage) -> list[str]:
    return [str(count) for count in (one.requests, one.errors, one.prompt_tokens, one.completion_tokens)]
