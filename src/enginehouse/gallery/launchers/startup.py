"""What all launchers do before and around their engine: arguments, the address, the check, the end.

This file is copied beside every launcher and runs in the engine's environment, so it imports nothing of enginehouse and
nothing but the standard library besides the engine. A launcher runs twice before a first answer, to check and to serve,
so what only one of them needs is imported there. It ends with 98 when the port cannot be had, so that its parent tries
another; other failures are told in its last line.
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


def begin(*modules: str) -> str:
    """Return the address to listen on. With `--check` the process ends here, after a look at these modules."""
    if sys.argv[1:] == ["--check"]:
        _check_engine(modules)
    _die_with_parent()
    # The default action ends the process at once. Python's own way would wait for the engine's threads.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if len(sys.argv) != 3 or sys.argv[1] != "--addr":
        leave(2, "usage: launcher.py --addr HOST:PORT, or --check: only see whether the engine can run here")
    return sys.argv[2]


def leave(code: int, message: str) -> NoReturn:
    """Ends at once: the engine's threads and destructors must neither delay the end nor write after the last line."""
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    os._exit(code)


def _die_with_parent() -> None:
    """Repeats what the parent asked for before exec: a shell between the two would otherwise have lost it."""
    if sys.platform == "linux":
        import ctypes

        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _check_engine(modules: tuple[str, ...]) -> NoReturn:
    """Whether the engine runs on this machine at all; asked once, before the backend is put in its place."""
    try:
        for module in modules:
            __import__(module)
        import xllamacpp
    except ImportError as error:
        told = " ".join(str(error).split())
        if "libgomp" in told:
            told = "the library libgomp.so.1 is missing; install it (on Debian and Ubuntu: apt-get install libgomp1)"
        leave(1, f"cannot use xllamacpp on this machine: {told}")
    xllamacpp.CommonParams()
    # At once, like `leave`: taking the engine's library apart takes as long as loading it.
    os._exit(0)


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal():
        leave(2, f"cannot read {address!r} as an address: it must be HOST:PORT")
    return host, int(port)


def read_model() -> dict[str, Any]:
    """Return the description of the model. It comes in a file, because every user of a machine can read command lines,
    and it holds the key.
    """
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


def parameters(path: str, threads: int, parallel: int) -> Any:
    """Return the engine's parameters. Only its parent talks to it: no browser origin, no page, no look into other
    people's requests.
    """
    import xllamacpp

    chosen = xllamacpp.CommonParams()
    chosen.model.path = path
    chosen.n_parallel = parallel
    chosen.cpuparams.n_threads = chosen.cpuparams_batch.n_threads = threads
    chosen.cors_origins, chosen.cors_credentials = "https://none.invalid", False
    chosen.ui, chosen.endpoint_slots, chosen.endpoint_props, chosen.offline = False, False, False, True
    chosen.verbosity = LOG_WARNINGS
    return chosen


def http_parameters(model: dict[str, Any], path: str, host: str, port: int) -> Any:
    """Return the parameters of an engine that serves one described model itself, over HTTP."""
    parallel = max(1, int(model.get("parallel") or 1))
    chosen = parameters(path, max(1, int(model.get("threads") or 1)), parallel)
    chosen.hostnames, chosen.port, chosen.api_keys = [host], port, [model["key"]]
    chosen.model_alias = {model["name"]}
    chosen.n_threads_http = HTTP_THREADS + parallel
    if model.get("gpu_layers") is not None:  # a worker of an older version says nothing about it
        chosen.n_gpu_layers = int(model["gpu_layers"])
    return chosen


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


def start(chosen: Any, host: str, port: int, trouble: str) -> Any:
    """Return the engine's server once it listens; `trouble` is the last line where it does not start."""
    import xllamacpp

    try:
        server = xllamacpp.Server(chosen)
    except (RuntimeError, ValueError):
        # The engine tells no reason. If the port was lost after the first check this one ends with the right code.
        check_port(host, port)
        leave(1, trouble)
    print(f"listening on {server.listening_address}", file=sys.stderr, flush=True)
    return server


def wait_for_ever() -> NoReturn:
    while True:
        signal.pause()
