"""`enginehouse frontend`: a single frontend, for clusters with their own NATS and database. Calls run.frontend."""

from __future__ import annotations

import os
from typing import Any

from enginehouse.cli.options.programs import (
    allow_host,
    galleries,
    listening,
    model_sources,
    node_networks,
    registry_credentials,
    serving,
    timings,
)
from enginehouse.cli.options.shared import NO_ANSWER, command, described, given, log_level
from enginehouse.core.errors import Invalid
from enginehouse.settings.programs import FrontendSettings, load


@command(
    "frontend",
    meanings=NO_ANSWER,
    examples=(
        "enginehouse frontend --nats-url nats://bus:4222",
        "ENGINEHOUSE_DATABASE_URL=postgresql://… enginehouse frontend --host 0.0.0.0",
        "ENGINEHOUSE_DATABASE_URL=postgresql://… enginehouse frontend --processes 4",
    ),
)
@listening
@described("processes", "COUNT")
@described("database_url", "URL")
@described("nats_url", "URL")
@described("store_timeout_seconds", "DURATION")
@described("start_wait_seconds", "DURATION")
@described("route_memory_seconds", "DURATION")
@described("approve_keys", "KEY,…")
@described("advertise_nats", "HOST[:PORT]")
@registry_credentials
@node_networks
@galleries
@model_sources
@allow_host
@timings
@serving
@log_level
def entry(**flags: Any) -> int:
    """Run one frontend alone.

    Any number of equal frontends may share one database and one NATS server. Their tokens come from
    ENGINEHOUSE_ADMIN_TOKEN and ENGINEHOUSE_JOIN_TOKEN; otherwise the first frontend creates them.
    """
    settings = load(FrontendSettings, {**flags, "data": given().data}, os.environ)
    if not settings.nats_url:
        raise Invalid(
            "cannot start a frontend without a NATS server: give one with --nats-url or ENGINEHOUSE_NATS_URL "
            "(`enginehouse up` starts its own)",
            code="invalid_setting",
            param="nats_url",
        )
    # Imported after the settings, so that a bad setting is reported at once.
    from enginehouse import run

    return run.frontend(settings)
