"""`enginehouse audit`: who changed what, and who was refused."""

from __future__ import annotations

from urllib.parse import urlencode

import click

from enginehouse.cli.answers import AuditPage, ListedAudit
from enginehouse.cli.client.connect import connect, read
from enginehouse.cli.options.shared import command, emit_json
from enginehouse.cli.terminal import output

_COLUMNS = ("WHEN", "WHO", "ROLE", "FROM", "WHAT", "RESULT", "OPERATION")


@command("audit", examples=("enginehouse audit", "enginehouse audit --who laptop --path /api/tokens --limit 200"))
@click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True, help="How many records.")
@click.option(
    "--who", default="", metavar="NAME", help="Only of the token of this name, or by the id of a token or session."
)
@click.option("--path", default="", metavar="PATH", help="Only of paths that begin like this.")
@click.option("--before", default="", metavar="ID", help="The page after the one whose `next` this is.")
def entry(limit: int, who: str, path: str, before: str) -> None:
    """List who changed what, newest first.

    Every change by a person or a program is recorded, with sign-ins and refused requests; bodies are not.
    """
    asked = {"limit": limit, "who": who, "path": path, "before": before}
    answer = connect().get(f"/api/audit?{urlencode({name: value for name, value in asked.items() if value})}")
    if emit_json(answer):
        return
    page = read(answer, AuditPage)
    output.emit_table(_COLUMNS, [_row(one) for one in page.audit], "nothing is recorded")
    if page.next:
        output.remark(f"more: --before {page.next}")


def _row(one: ListedAudit) -> tuple[str, ...]:
    what = f"{one.method} {one.path}".strip() or one.summary
    if one.target and one.target not in what:
        what += f" ({one.target})"  # a path may have an id only, of a node that is gone by now
    result = " ".join([str(one.status), one.error]).strip() if one.status else ""
    many = f" ({one.count} times)" if one.count > 1 else ""
    when = one.at.partition(".")[0].rstrip("Z").replace("T", " ")
    return (when, one.who or "-", one.role or "-", one.address, what, f"{result}{many}", one.operation_id[:8])
