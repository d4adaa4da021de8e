"""`enginehouse worker`: the program on a node, set up by variables or flags. `join` is the same for people."""

from __future__ import annotations

import os
from typing import Any

from enginehouse.cli.options.galleries import installing
from enginehouse.cli.options.shared import JOIN_TOKEN, command, given, log_level, setting


@command(
    "worker",
    meanings={
        "--url": "The frontend to join, or several with commas (ENGINEHOUSE_URL).",
        "--token": JOIN_TOKEN,
        "--json": "",
    },
    examples=(
        "enginehouse worker --url http://server:8080 --token - < join.token",
        "ENGINEHOUSE_URL=http://server:8080 ENGINEHOUSE_TOKEN=… enginehouse worker --name attic",
    ),
)
@setting("name", "Name of this node (the host name).", "NAME")
@setting("nats_url", "The NATS server, where the frontend does not say; may hold user:password@.", "URL")
@setting("advertise_host", "Address of this machine as the frontend reaches it.", "ADDRESS")
@setting("base_port", "First port for engines (50051).", "PORT")
@setting("labels", "Labels of this node.", "KEY=VALUE,…")
@setting("grace_seconds", "How long an engine may take to stop (10s).", "DURATION")
@setting("max_replicas_per_model", "Replicas of one model on this node (1).", "NUMBER")
@installing
@log_level
def entry(**flags: Any) -> int:
    """Run the worker of a node alone.

    Reads LocalAI's LOCALAI_REGISTER_TO, LOCALAI_REGISTRATION_TOKEN, LOCALAI_NODE_NAME, LOCALAI_NODE_LABELS and
    LOCALAI_NATS_URL too.
    """
    from enginehouse.settings.programs import WorkerSettings, load

    shared = given()
    flags = {**flags, "data": shared.data, "url": shared.url, "token": shared.token}
    settings = load(WorkerSettings, flags, os.environ)
    # After the settings: a bad one is told at once, without importing a whole worker.
    from enginehouse import run

    return run.worker(settings)
