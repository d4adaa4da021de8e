"""Flags for settings that several programs and commands share. `settings.load` checks their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from enginehouse.cli.options.shared import described, setting
from enginehouse.settings.descriptions import DESCRIPTIONS, TIMINGS

Decorate = Callable[[Callable[..., Any]], Callable[..., Any]]


def together(*flags: Decorate) -> Decorate:
    """Add these flags, in this order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for flag in reversed(flags):
            function = flag(function)
        return function

    return decorate


model_credentials = described("model_credentials", "FILE")
registry_credentials = described("registry_credentials", "FILE")
node_networks = described("node_networks", "CIDR,…")
listening = together(
    described("host", "ADDRESS"),
    described("port", "PORT"),
)
# None if it was not given, so that the variable and the file are read.
allow_host = click.option(
    "--allow-host",
    "allowed_hosts",
    multiple=True,
    metavar="HOST",
    callback=lambda context, parameter, value: value or None,
    help=f"{DESCRIPTIONS['allowed_hosts'].removesuffix('.')}; repeatable.",
)
installing = together(
    allow_host,
    registry_credentials,
    setting(
        "engine_confinement",
        "auto: engines may access only what they need; off: all that this user may (auto).",
        "auto|off",
    ),
    setting("engine_user", "Run engines as this user; the worker must be root.", "NAME"),
    setting("blob_cap_bytes", "How much downloaded data is kept for later versions (20GiB).", "SIZE"),
    setting("archive_limit_bytes", "Largest image that is unpacked (20GiB).", "SIZE"),
    setting("backends_system_path", "Directory of backends that are part of the system.", "DIR"),
)
# Commands with this flag also need `allow_host` or `installing`.
galleries = described("backend_galleries", "JSON")
model_sources = together(
    model_credentials,
    described("schedules", "FILE"),
    described("hf_endpoint", "URL"),
    described("model_galleries", "JSON"),
)
node = together(
    setting("name", "Name of this node (the host name).", "NAME"),
    setting("nats_url", "NATS server, if the frontend does not send one; may contain user:password@.", "URL"),
    setting("advertise_host", "Address at which the frontend reaches this machine.", "ADDRESS"),
    setting("base_port", "First port for engines (50051).", "PORT"),
    setting("http_port", "Port for files and logs (the one below the first port for engines).", "PORT"),
    setting("labels", "Labels of this node.", "KEY=VALUE,…"),
)
timings = together(*(described(field, "DURATION") for field in TIMINGS))
serving = together(
    described("prefix_cache", "on|off"),
    described("prefix_cache_ttl_seconds", "DURATION"),
    described("queue_length", "COUNT"),
    described("queue_wait_seconds", "DURATION"),
)
