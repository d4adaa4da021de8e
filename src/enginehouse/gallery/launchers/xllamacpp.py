"""Serves one GGUF model over HTTP in OpenAI's protocol with xllamacpp.

This file is copied into the backend's directory beside `startup.py` and runs in its environment, so it imports nothing
of enginehouse. The address is the only argument; everything else, the key above all, comes from the JSON file named by
ENGINEHOUSE_MODEL_FILE.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginehouse.gallery.launchers import startup
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # -I leaves it out
    import startup


def check_model(path: str) -> None:
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        startup.leave(1, f"cannot read the model file {os.path.basename(path)}: {error.strerror}")
    if magic != b"GGUF":
        startup.leave(1, f"cannot load {os.path.basename(path)}: it is not a GGUF file")


def serve(model: dict[str, Any], host: str, port: int) -> None:
    path = model["path"]
    check_model(path)
    startup.check_port(host, port)
    chosen = startup.http_parameters(model, path, host, port)
    # The engine divides its context among the slots; what was asked for is the context of each request.
    chosen.n_ctx = int(model.get("context") or 0) * chosen.n_parallel
    name = os.path.basename(path)
    trouble = f"cannot load {name}: the file is cut off, damaged or of an unknown kind, or memory is short"
    _server = startup.start(chosen, host, port, trouble)
    startup.wait_for_ever()


if __name__ == "__main__":
    host, port = startup.split_address(startup.begin())
    serve(startup.read_model(), host, port)
