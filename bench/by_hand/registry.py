"""A real registry for benchmarks: Debian's docker-registry on a free port of loopback."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

_START_SECONDS = 20.0


@contextlib.contextmanager
def running_registry(place: Path) -> Iterator[str]:
    """Its host:port, while inside."""
    place.mkdir(parents=True)
    (place / "config.yml").write_text(
        "version: 0.1\n"
        "log: {level: info, accesslog: {disabled: true}}\n"
        f"storage: {{filesystem: {{rootdirectory: {place / 'storage'}}}}}\n"
        "http: {addr: '127.0.0.1:0'}\n"
    )
    log = place / "log"
    with log.open("wb") as writer:
        process = subprocess.Popen(
            ["docker-registry", "serve", str(place / "config.yml")],
            stdout=writer,
            stderr=writer,
            env={"PATH": "/usr/bin:/bin", "OTEL_TRACES_EXPORTER": "none"},
        )
    try:
        end = time.monotonic() + _START_SECONDS
        while not (found := re.search(r"listening on (127\.0\.0\.1:\d+)", log.read_text(errors="replace"))):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"docker-registry did not start: {log.read_text(errors='replace')[-500:]}")
            time.sleep(0.02)
        yield found[1]
    finally:
        process.kill()
        process.wait()
