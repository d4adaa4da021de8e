"""Placeholder."""

from enginehouse.cli.options.shared import command


@command("doctor", examples=("enginehouse doctor",))
def entry() -> None:
    """Check."""
