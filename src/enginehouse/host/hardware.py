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

from enginehouse.core.capability import Decision, Facts, check_capability, decide, platform_of
from enginehouse.core.capacity import Capacity
from enginehouse.core.errors import Invalid
from enginehouse.core.name import check_name
from enginehouse.host.graphics import DevicePaths, Watch
from enginehouse.host.processors import ProcessorWatch

_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_QUOTA = _CGROUP / "cpu.max"
_TOOLKITS = Path("/usr/local")
_CUDA_RELEASES = (13, 12)  # releases for which galleries have builds
FORCING = ("ENGINEHOUSE_CAPABILITY", "LOCALAI_FORCE_META_BACKEND_CAPABILITY")
RUN_FILE_VARIABLE = "LOCALAI_FORCE_META_BACKEND_CAPABILITY_RUN_FILE"
RUN_FILE = "/run/localai/capability"  # present in LocalAI's container images
_LONGEST_WORD = 256
FRESH_SECONDS = 1.0  # how old the memory of cards may be when an engine is started: the one before it may have taken it
_graphics = Watch(DevicePaths())
_processors = ProcessorWatch()


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


def memory(group: Path = _CGROUP) -> tuple[int, int]:
    """Return the total and the available memory: the machine's, within the limit of a container."""
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            # The page cache counts as used there, but is given up when memory is needed.
            used = int((group / "memory.current").read_text())
            used -= min(used, _statistic(group / "memory.stat", "inactive_file"))
            total, available = min(total, int(limit)), min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return total, available


def _statistic(file: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(f"{name} ")), 0)


def capacity(path: Path) -> Capacity:
    """Return the capacity of this machine, with the disk of `path`."""
    total, available = memory()
    disk = psutil.disk_usage(str(path))
    graphics = _graphics.look()
    usable = cores()
    return Capacity(
        cores=usable,
        used_cores=_processors.look(usable),
        total_vram=graphics.total_bytes,
        available_vram=graphics.free_bytes,
        total_ram=total,
        # 0 would mean unknown.
        available_ram=max(1, available),
        total_disk=disk.total,
        available_disk=disk.free,
        gpu_vendor=graphics.vendor,
        gpu_compute_capability=graphics.compute_capability,
        gpu_cards=graphics.cards,
    )


def graphics_capacity() -> Capacity:
    """Return what the graphics cards have now; nothing else of the capacity. Blocks: may run a tool of the vendor."""
    graphics = _graphics.look(FRESH_SECONDS)
    return Capacity(
        total_vram=graphics.total_bytes,
        available_vram=graphics.free_bytes,
        gpu_vendor=graphics.vendor,
        gpu_cards=graphics.cards,
    )


def has_card() -> bool:
    """Whether an engine can compute on a graphics card here. Every Mac has one, which is not looked for."""
    return bool(_graphics.look().vendor) or system.system() == "Darwin"


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
        return check_capability(check_name(word, "capability"))
    except Invalid as error:
        reason = error.message.partition(": ")[2]
        raise Invalid(f"cannot use {word!r} from {place}: {reason}", code="invalid_setting") from error


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
