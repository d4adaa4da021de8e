"""Serves one GGUF model over HTTP in OpenAI's protocol with xllamacpp.

This file is copied into the backend's directory and runs in its environment, so it imports nothing of enginehouse and
nothing but the standard library besides the engine. The address is the only argument; everything else, the key above
all, comes from the JSON file named by ENGINEHOUSE_MODEL_FILE, because every user of a machine can read command lines.
It ends with 98 when the port cannot be had, so that its parent tries another; other failures are told in its last line.
It runs twice before a first answer, to check and to serve, so what only one of them needs is imported there.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

CANNOT_BIND = 98  # EADDRINUSE on Linux
PR_SET_PDEATHSIG = 1
LOG_WARNINGS = 2  # one level more writes eight lines for every request, for as long as the process lives
# Besides the threads that compute. The server gives one to every open connection, streaming, waiting or idle, so these
# are how many requests may be here at once; the rest wait outside.
HTTP_THREADS = 32


def die_with_parent() -> None:
    """Repeats what the parent asked for before exec: a shell between the two would otherwise have lost it."""
    if sys.platform == "linux":
        import ctypes

        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def leave(code: int, message: str) -> NoReturn:
    """Ends at once: the engine's threads and destructors must neither delay the end nor write after the last line."""
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    os._exit(code)


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal():
        leave(2, f"cannot read {address!r} as an address: it must be HOST:PORT")
    return host, int(port)


def check_port(host: str, port: int) -> None:
    """The engine itself says only that it could not start, so the reason is found out here first."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            # As the engine's own server does: a port in TIME_WAIT is free, a listening one is not.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            leave(CANNOT_BIND, f"cannot listen on {host}:{port}: {error.strerror}")


def check_model(path: str) -> None:
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        leave(1, f"cannot read the model file {os.path.basename(path)}: {error.strerror}")
    if magic != b"GGUF":
        leave(1, f"cannot load {os.path.basename(path)}: it is not a GGUF file")


def parameters(model: dict[str, Any], host: str, port: int) -> Any:
    import xllamacpp

    chosen = xllamacpp.CommonParams()
    parallel = max(1, int(model.get("parallel") or 1))
    threads = max(1, int(model.get("threads") or 1))
    chosen.model.path = model["path"]
    chosen.hostnames = [host]
    chosen.port = port
    chosen.api_keys = [model["key"]]
    chosen.model_alias = {model["name"]}
    # The engine divides its context among the slots; what was asked for is the context of each request.
    chosen.n_ctx = int(model.get("context") or 0) * parallel
    chosen.n_parallel = parallel
    chosen.cpuparams.n_threads = threads
    chosen.cpuparams_batch.n_threads = threads
    chosen.n_threads_http = HTTP_THREADS + parallel
    # Only the frontend talks to it: no browser origin, no page, no look into other people's requests.
    chosen.cors_origins = "https://none.invalid"
    chosen.cors_credentials = False
    chosen.ui = False
    chosen.endpoint_slots = False
    chosen.endpoint_props = False
    chosen.offline = True
    chosen.verbosity = LOG_WARNINGS
    return chosen


def serve(model: dict[str, Any], host: str, port: int) -> None:
    import xllamacpp

    name = os.path.basename(model["path"])
    check_model(model["path"])
    check_port(host, port)
    try:
        server = xllamacpp.Server(parameters(model, host, port))
    except (RuntimeError, ValueError):
        # The engine tells no reason. If the port was lost after the first check this one ends with the right code.
        check_port(host, port)
        leave(1, f"cannot load {name}: the file is cut off, damaged or of an unknown kind, or memory is short")
    print(f"listening on {server.listening_address}", file=sys.stderr, flush=True)
    while True:
        signal.pause()


def check_engine() -> NoReturn:
    """Whether the engine runs on this machine at all; asked once, before the backend is put in its place."""
    try:
        import xllamacpp
    except ImportError as error:
        told = " ".join(str(error).split())
        if "libgomp" in told:
            told = "the library libgomp.so.1 is missing; install it (on Debian and Ubuntu: apt-get install libgomp1)"
        leave(1, f"cannot use xllamacpp on this machine: {told}")
    xllamacpp.CommonParams()
    # At once, like `leave`: taking the engine's library apart takes as long as loading it.
    os._exit(0)


def read_model() -> dict[str, Any]:
    import json

    model_file = os.environ.get("ENGINEHOUSE_MODEL_FILE")
    if not model_file:
        leave(2, "cannot start: ENGINEHOUSE_MODEL_FILE does not name the file that describes the model")
    try:
        with open(model_file, encoding="utf-8") as file:
            model: dict[str, Any] = json.load(file)
    except (OSError, ValueError) as error:
        leave(2, f"cannot read the description of the model: {error}")
    return model


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        check_engine()
    die_with_parent()
    # The default action ends the process at once. Python's own way would wait for the engine's threads.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if len(sys.argv) != 3 or sys.argv[1] != "--addr":
        leave(2, "usage: launcher.py --addr HOST:PORT, or --check: only see whether the engine can run here")
    host, port = split_address(sys.argv[2])
    serve(read_model(), host, port)


if __name__ == "__main__":
    main()
