"""Flags for settings that several programs and commands share. `settings.load` checks their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from enginehouse.cli.options.shared import setting

Decorate = Callable[[Callable[..., Any]], Callable[..., Any]]


def together(*flags: Decorate) -> Decorate:
    """Add these flags, in this order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for flag in reversed(flags):
            function = flag(function)
        return function

    return decorate


model_credentials = setting("model_credentials", 'A file of lines NAME = "SECRET", for sources of models.', "FILE")
registry_credentials = setting("registry_credentials", 'A file of lines "HOST" = "USER:PASSWORD".', "FILE")
node_networks = setting(
    "node_networks", "Networks within which an approved node may move without another approval.", "CIDR,…"
)
listening = together(
    setting("host", "Address to listen on (127.0.0.1).", "ADDRESS"),
    setting("port", "HTTP port; if not given, 8080 or the next free one.", "PORT"),
)
# None if it was not given, so that the variable and the file are read.
allow_host = click.option(
    "--allow-host",
    "allowed_hosts",
    multiple=True,
    metavar="HOST",
    callback=lambda context, parameter, value: value or None,
    help="A host or network that may be reached although it is not public; http://HOST allows HTTP; repeatable.",
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
galleries = setting("backend_galleries", "Galleries after the built-in one, in LocalAI's format; [] for none.", "JSON")
model_sources = together(
    model_credentials,
    setting("schedules", "A YAML or JSON file with a list of schedules, stored at each start.", "FILE"),
    setting("hf_endpoint", "Hugging Face, or a mirror of it (https://huggingface.co).", "URL"),
    setting("model_galleries", "Galleries of models, in LocalAI's format; [] for none.", "JSON"),
)
node = together(
    setting("name", "Name of this node (the host name).", "NAME"),
    setting("nats_url", "NATS server, if the frontend does not send one; may contain user:password@.", "URL"),
    setting("advertise_host", "Address at which the frontend reaches this machine.", "ADDRESS"),
    setting("base_port", "First port for engines (50051).", "PORT"),
    setting("http_port", "Port for files and logs (the one below the first port for engines).", "PORT"),
    setting("labels", "Labels of this node.", "KEY=VALUE,…"),
)
_TIMINGS = {
    "heartbeat_seconds": "Interval of the workers' heartbeats (10s).",
    "stale_seconds": "A node is unhealthy after this long without a heartbeat, offline after twice that (30s).",
    "lease_seconds": "Lease of a frontend on what it dispatched (30s).",
    "reconcile_seconds": "Interval of comparing requests and reports (5s).",
    "stall_seconds": "A running action is shown as silent after this long without progress (2m).",
    "backend_install_timeout_seconds": "The same for an install that never reported progress (15m).",
    "backend_upgrade_timeout_seconds": "The same for an upgrade that never reported progress (15m).",
    "model_load_wait_seconds": "How long a request waits for its model to load; 0 means no limit (60s).",
    "canary_seconds": "How long the first nodes of an upgrade must stay ready before the others follow (30s).",
    "canary_limit_seconds": "When an upgrade whose first nodes do not become ready is taken back (15m).",
    "session_seconds": "How long a person stays signed in to the web page (168h).",
    "audit_kept_seconds": "How long it is kept who changed what (2160h).",
    "bus_credential_seconds": "Lifetime of a worker's bus credential (1h).",
}
timings = together(*(setting(field, text, "DURATION") for field, text in _TIMINGS.items()))
serving = together(
    setting("prefix_cache", "Requests that begin alike go to one replica; models may say otherwise (on).", "on|off"),
    setting("prefix_cache_ttl_seconds", "How long a replica is expected to remember a prompt (5m).", "DURATION"),
    setting("queue_length", "Requests per model that wait while all replicas are full; 0: none (1024).", "COUNT"),
    setting("queue_wait_seconds", "How long such a request waits before it gets 503 (60s).", "DURATION"),
)
