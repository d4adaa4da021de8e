"""`enginehouse nodes drain`: when it is safe to stop a machine."""

from __future__ import annotations

import time
from collections.abc import Collection

import click

from enginehouse.cli.client.connect import FrontendApi, connect, segment
from enginehouse.cli.client.follow import exit_code_of, follow
from enginehouse.cli.client.several import before, for_each, raise_refused
from enginehouse.cli.commands.ops import finish
from enginehouse.cli.options.durations import DURATION
from enginehouse.cli.options.shared import command, no_follow_option, wants_json
from enginehouse.cli.terminal import output

_SAFE = "{} is drained and safe to stop"
NOT_YET_SAFE = 3  # the exit code of a drain that did not end in time: a part of it is done


@command(
    "drain",
    examples=(
        "enginehouse nodes drain attic",
        "enginehouse nodes drain attic cellar",
        "enginehouse nodes drain attic --wait 2m",
    ),
)
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
@click.option(
    "--wait",
    "wait_seconds",
    type=DURATION,
    metavar="DURATION",
    help="Wait so long at most until it is safe to stop; exit with 3 if it is not by then.",
)
@no_follow_option
def drain(nodes: tuple[str, ...], wait_seconds: float | None, no_follow: bool) -> int:
    """Give each NODE no more work and stop its replicas, until it is safe to stop its machine.

    Replicas stop when their answers have ended. Models that have no other replica are loaded on another node first.
    Operations for NODE wait until `enginehouse nodes resume`. A node that is away is drained when it returns; without
    --wait the command does not wait for that.
    """
    if no_follow and wait_seconds is not None:
        raise click.UsageError("--wait and --no-follow exclude each other")
    frontend = connect()
    were = before(frontend, nodes)
    # All are requested before the first is followed, so that no model moves to a node that is drained next.
    answers, refused = for_each(were, lambda node: frontend.request("POST", f"/api/nodes/{segment(node)}/drain"))
    deadline = None if wait_seconds is None else time.monotonic() + wait_seconds
    drained = {one.name for one in were.values() if one.drained}
    codes = [_follow_drain(frontend, one, deadline, wait_seconds, drained, no_follow=no_follow) for one in answers]
    raise_refused(refused)
    failed = [code for code in codes if code not in (0, NOT_YET_SAFE)]
    return failed[0] if failed else max(codes)


def _follow_drain(
    frontend: FrontendApi,
    answer: object,
    deadline: float | None,
    wait_seconds: float | None,
    drained: Collection[str],
    *,
    no_follow: bool,
) -> int:
    if no_follow:
        return finish(frontend, answer, no_follow=True)
    left_seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
    ended = follow(frontend, answer, limit_seconds=left_seconds)
    if ended.status == "succeeded" and not wants_json():
        is_old = ended.name in drained
        output.say(f"= {ended.name} was drained already; it is safe to stop" if is_old else _SAFE.format(ended.name))
    if wait_seconds is not None and not ended.has_ended:
        left = f"see it with `enginehouse ops follow {ended.jobID}`"
        output.remark(f"{ended.name} is not safe to stop after {wait_seconds:g} s; the drain goes on, {left}")
        return NOT_YET_SAFE
    return exit_code_of(ended)
