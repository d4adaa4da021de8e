"""The hardware of this machine: cores, memory, disk, platform, graphics cards, free ports.

Observes only; `core.capability` decides what the machine can run. Values 0 and "" mean unknown, never exhausted.
"""

from __future__ import annotations

import os
import platform as system
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from enginehouse.core.capability import Decision, Facts, decide, platform_of
from enginehouse.core.capacity import Capacity
from enginehouse.core.errors import Invalid
from enginehouse.core.name import check_name
from enginehouse.host.graphics import DevicePaths, Watch

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_TOOLKITS = Path("/usr/local")
_CUDA_RELEASES = (13, 12)  # releases for which galleries have builds
FORCING = ("ENGINEHOUSE_CAPABILITY", "LOCALAI_FORCE_META_BACKEND_CAPABILITY")
RUN_FILE_VARIABLE = "LOCALAI_FORCE_META_BACKEND_CAPABILITY_RUN_FILE"
RUN_FILE = "/run/localai/capability"  # present in LocalAI's container images
_LONGEST_WORD = 256
_graphics = Watch(DevicePaths())


def cores(quota_file: Path = _CGROUP_QUOTA) -> int:
    """Return the cores that this process may use: its affinity, limited by the quota of a container."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = quota_file.read_text().split()
        if quota != "max":
            usable = min(usable, int(quota) // int(period))
    except (OSError, ValueError):
        pass
    return max(1, usable)


def platform() -> str:
    return platform_of(system.system(), system.machine())


def capacity(path: Path) -> Capacity:
    """Return the capacity of this machine, with the disk of `path`."""
    memory = psutil.virtual_memory()
    disk = psutil.disk_usage(str(path))
    graphics = _graphics.look()
    return Capacity(
        cores=cores(),
        total_vram=graphics.total_bytes,
        available_vram=graphics.free_bytes,
        total_ram=memory.total,
        available_ram=memory.available,
        total_disk=disk.total,
        available_disk=disk.free,
        gpu_vendor=graphics.vendor,
        gpu_compute_capability=graphics.compute_capability,
    )


def graphics_vendor() -> str:
    return _graphics.look().vendor


def capability() -> str:
    return detect().capability


def detect(environment: Mapping[str, str] = os.environ, toolkits: Path = _TOOLKITS) -> Decision:
    """Return the capability of this machine and the reason for it. Blocks: may run a tool of the vendor."""
    forced, place = _forced(environment)
    if forced:
        return decide(Facts(platform=platform(), forced=forced, forced_by=place))
    graphics = _graphics.look()
    return decide(
        Facts(
            platform=platform(),
            gpu_vendor=graphics.vendor,
            total_vram=graphics.total_bytes,
            cuda_toolkits=tuple(number for number in _CUDA_RELEASES if (toolkits / f"cuda-{number}").is_dir()),
            driver=graphics.driver,
        )
    )


def _forced(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the forced capability and its source: our variable, LocalAI's variable, LocalAI's file."""
    for variable in FORCING:
        if environment.get(variable, "").strip():
            return _checked(environment[variable].strip(), variable), variable
    file = Path(environment.get(RUN_FILE_VARIABLE) or RUN_FILE)
    try:
        text = file.read_text("utf-8", "replace")[:_LONGEST_WORD].strip()
    except OSError:
        return "", ""
    return (_checked(text, str(file)), str(file)) if text else ("", "")


def _checked(word: str, place: str) -> str:
    try:
        return check_name(word, "capability")
    except Invalid as error:
        raise Invalid(f"cannot use the capability of {place}: {error.message}", code="invalid_setting") from error


def is_port_free(host: str, port: int) -> bool:
    """Whether a server could listen on the port now. Another process may still take it first."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except (OSError, OverflowError):
            return False
    return True
