"""`enginehouse top`: the cluster live, on the whole screen of a terminal."""

from __future__ import annotations

import sys

from enginehouse.cli.client.connect import FrontendApi, connect
from enginehouse.cli.client.live import LiveCluster
from enginehouse.cli.options.shared import command
from enginehouse.cli.terminal.output import is_terminal
from enginehouse.core.errors import Invalid


@command("top", examples=("enginehouse top", "enginehouse top --url http://desk:8080"), meanings={"--json": ""})
def entry() -> int:
    """Show the cluster live on the whole screen, with keys to act.

    Nodes, operations, backends and models, as the page shows them; approve, drain, upgrade, load, cancel and retry.
    Press ? for the keys, q to quit. Quitting ends nothing.
    """
    # The screen is drawn on stderr, and the keys are read from stdin.
    if not all(is_terminal(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise Invalid(
            "cannot show the cluster live: this is not a terminal that can draw a screen; "
            "use `enginehouse nodes list` and `enginehouse ops list`",
            code="invalid_setting",
        )
    frontend = connect()
    frontend.get("/api/nodes?limit=1")  # a wrong address or token is an ordinary error, before the screen is taken
    from enginehouse.cli.terminal.top.app import TopApp

    view = TopApp(LiveCluster(FrontendApi(frontend.client, is_quiet=True)))
    code = view.run()
    return (view.return_code or 0) if code is None else code
