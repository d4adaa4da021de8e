"""What the doctor looks at on this machine: disk, ports, kernel and graphics. Needs no server."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from pathlib import Path

from enginehouse.cli.client.reaching import is_of_server, read_node_record, read_waiting_record
from enginehouse.core.capability import too_new
from enginehouse.core.errors import EnginehouseError
from enginehouse.core.finding import Finding, disk_finding
from enginehouse.core.progress import format_bytes
from enginehouse.host import confinement, disk, hardware

# The default ports, and who listens there. Busy ones are replaced by the next free one, which other machines must know.
PORTS = {8080: "the frontend", 4222: "NATS", 50051: "the first engine", 50050: "the worker's files and logs"}
FEW_FILES = 4096  # open files; a frontend with a thousand streams holds more than two thousand
_DRIVER_OF_CUDA_12 = 525


def look_here(data: Path) -> list[Finding]:
    return [_data(data), *_ports(data), *_worker(data), *_kernel(), *_graphics(data)]


def _data(data: Path) -> Finding:
    place = next((one for one in (data, *data.parents) if one.exists()), Path("/"))
    what = f"data on this machine ({data})"
    if not os.access(place, os.W_OK):
        advice = f"Use the account that owns {place}, or another --data"
        return Finding(area="disk", level="problem", message=f"{what}: this user may not write there", advice=advice)
    usage = shutil.disk_usage(place)
    return disk_finding(what, usage.free, usage.total, format_bytes(usage.free))


def _ports(data: Path) -> list[Finding]:
    """Whether the default ports are free, where nothing of ours runs yet."""
    if (data / "server.json").exists() or read_node_record(data) is not None:
        return []
    busy = [f"{port} ({who})" for port, who in PORTS.items() if not hardware.is_port_free("127.0.0.1", port)]
    if not busy:
        return [Finding(area="ports", level="ok", message=f"the default ports are free: {', '.join(map(str, PORTS))}")]
    return [
        Finding(
            area="ports",
            level="note",
            message=f"in use by other programs: {', '.join(busy)}",
            advice="The next free ones are taken. Give fixed ones where a firewall must know them: --port, --nats-port",
        )
    ]


def _worker(data: Path) -> list[Finding]:
    """Whether the worker of a machine that has joined a server runs, or the server with the worker of its own."""
    record, waiting = read_node_record(data), read_waiting_record(data)
    is_running = disk.is_locked(data / "worker.lock")
    if waiting is not None and is_running:
        message = f"the worker of this machine waits to join its server: {waiting.reason}"
        return [Finding(area="node", level="problem", message=message)]
    if record is None or (data / "server.json").exists():
        return []
    if is_running:
        return [Finding(area="node", level="ok", message=f"the worker of {record.name} runs here")]
    if is_of_server(data):
        message, advice = f"the server of this machine ({data}) does not run", "Start it as before: enginehouse up"
        return [Finding(area="server", level="problem", message=message, advice=advice)]
    message = f"the worker of {record.name} does not run here"
    advice = f"Start it: enginehouse join {','.join(record.frontends) or 'URL'} --name {record.name}"
    return [Finding(area="node", level="problem", message=message, advice=advice)]


def _kernel() -> list[Finding]:
    found = []
    chosen = confinement.choose("auto", "")
    if chosen.is_on:
        found.append(Finding(area="kernel", level="ok", message=f"engines are confined by {chosen.described}"))
    else:
        advice = "Use a kernel with Landlock (5.13 or newer), or as root --engine-user NAME"
        message = f"engines are not confined: {chosen.reason}"
        found.append(Finding(area="kernel", level="note", message=message, advice=advice))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit != resource.RLIM_INFINITY and limit < FEW_FILES:
        advice = f"Raise it: ulimit -n {FEW_FILES}, or LimitNOFILE= of the service"
        message = f"a process may open {limit} files at most"
        found.append(Finding(area="kernel", level="note", message=message, advice=advice))
    if sys.platform not in ("linux", "darwin"):
        found.append(Finding(area="kernel", level="note", message=f"{sys.platform} is not tested", advice="Use Linux"))
    return found


def _graphics(data: Path) -> list[Finding]:
    """Whether the driver runs the builds that are chosen for this machine, and those that are installed."""
    try:
        decision, vendor = hardware.detect(), hardware.graphics_vendor()
    except EnginehouseError as error:
        return [Finding(area="graphics", level="problem", message=error.message)]
    found = [Finding(area="graphics", level="ok", message=f"capability {decision.capability}: {decision.reason}")]
    if vendor == "nvidia" and "cuda" not in decision.capability and decision.capability.startswith("nvidia"):
        found = [
            Finding(
                area="graphics",
                level="problem",
                message="an NVIDIA card is here, but no driver that runs CUDA 12 or newer answers",
                advice=f"Install NVIDIA's driver {_DRIVER_OF_CUDA_12} or newer, and check it with: nvidia-smi",
            )
        ]
    for name, uri in _installed(data):
        reason = too_new(decision.capability, name, uri)
        if reason:
            found.append(
                Finding(
                    area="graphics",
                    level="problem",
                    message=f"{name} cannot run here: {reason}",
                    advice="Update the driver, or install the build for this machine: enginehouse backends upgrade",
                )
            )
    return found


def _installed(data: Path) -> list[tuple[str, str]]:
    """Names and sources of what is installed here."""
    if not (data / "backends").is_dir():
        return []
    from enginehouse.worker.backends.trees import Trees

    try:
        return [(one.name, one.uri) for one in Trees(data / "backends").list_installed() if not one.is_meta]
    except OSError:
        return []
