"""The flags of a node, which `worker` and `join` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from enginehouse.cli.options.shared import setting

_FLAGS = (
    setting("name", "Name of this node (the host name).", "NAME"),
    setting("nats_url", "NATS server, if the frontend does not send one; may contain user:password@.", "URL"),
    setting("advertise_host", "Address at which the frontend reaches this machine.", "ADDRESS"),
    setting("base_port", "First port for engines (50051).", "PORT"),
    setting("http_port", "Port for files and logs (the one below the first port for engines).", "PORT"),
    setting("labels", "Labels of this node.", "KEY=VALUE,…"),
)


def node(function: Callable[..., Any]) -> Callable[..., Any]:
    for flag in reversed(_FLAGS):
        function = flag(function)
    return function
