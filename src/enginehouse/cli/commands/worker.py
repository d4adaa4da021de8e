"""`enginehouse worker`: the worker of a node, for service managers; `join` is for people. Calls run.worker."""

from __future__ import annotations

import os
from typing import Any

from enginehouse.cli.options.programs import installing, model_credentials, node
from enginehouse.cli.options.shared import JOIN_TOKEN, command, given, log_level, setting
from enginehouse.settings.programs import WorkerSettings, load


@command(
    "worker",
    meanings={
        "--context": "",
        "--url": "The frontend to join, or several with commas (ENGINEHOUSE_URL).",
        "--token": JOIN_TOKEN,
        "--json": "",
    },
    examples=(
        "enginehouse worker --url http://server:8080 --token - < join.token",
        "ENGINEHOUSE_URL=http://server:8080 ENGINEHOUSE_TOKEN=… enginehouse worker --name attic",
    ),
)
@node
@setting("grace_seconds", "How long an engine may take to stop (10s).", "DURATION")
@setting("max_replicas_per_model", "Replicas of one model on this node (1).", "NUMBER")
@model_credentials
@setting("model_directories", "Shared storage from which models may name files, read in place.", "PATH,…")
@installing
@log_level
def entry(**flags: Any) -> int:
    """Run the worker of a node alone.

    Also reads LocalAI's LOCALAI_REGISTER_TO, LOCALAI_REGISTRATION_TOKEN, LOCALAI_NODE_NAME, LOCALAI_NODE_LABELS and
    LOCALAI_NATS_URL.
    """
    shared = given()
    flags = {**flags, "data": shared.data, "url": shared.url, "token": shared.token}
    settings = load(WorkerSettings, flags, os.environ)
    # Imported after the settings, so that a bad setting is reported at once.
    from enginehouse import run

    return run.worker(settings)
