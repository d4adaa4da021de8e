"""`enginehouse version`: the version, and with --json what a bug report needs."""

from __future__ import annotations

from enginehouse import __version__
from enginehouse.cli.options.shared import NO_SERVER, command, wants_json
from enginehouse.cli.terminal.output import emit_json, say


@command("version", meanings=NO_SERVER, examples=("enginehouse version", "enginehouse version --json"))
def entry() -> None:
    """Show the version."""
    import platform

    if wants_json():
        emit_json({"version": __version__, "python": platform.python_version(), "platform": platform.platform()})
    else:
        say(f"enginehouse {__version__}")
