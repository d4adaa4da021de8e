"""Durations on the command line: plain seconds, or `90s`, `15m` and `1h30m` as in the settings of programs."""

from __future__ import annotations

import click

from enginehouse.core.errors import Invalid


class DurationType(click.ParamType[float]):
    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        # Only here, because most commands have no duration.
        from enginehouse.settings.values import parse_duration

        try:
            return parse_duration(value, zero_allowed=True)
        except Invalid as error:
            self.fail(error.message, param, ctx)


DURATION = DurationType()
