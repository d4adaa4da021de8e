"""What this machine is: cores, memory, disk, platform, graphics cards, free ports.

Only figures that are known are given; 0 and "" mean "not known", never "none left".
"""

from __future__ import annotations

import os
import platform as system
import socket
from pathlib import Path

import psutil

from enginehouse.core.capability import capability_of, platform_of
from enginehouse.core.node import Capacity

_VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
_PRIORITY = ("nvidia", "amd", "intel")
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_CARDS = Path("/sys/class/drm")


def cores(quota_file: Path = _CGROUP_QUOTA) -> int:
    """Cores that this process may use: its affinity, cut by a container's quota."""
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


def gpu(cards: Path = _CARDS) -> tuple[str, int]:
    """Vendor and total memory of the graphics cards; LocalAI's order of vendors when there are several."""
    found: dict[str, int] = {}
    for card in cards.glob("card*"):
        if "-" in card.name:  # a connector of a card
            continue
        try:
            vendor = _VENDORS.get((card / "device" / "vendor").read_text().strip().lower())
        except OSError:
            continue
        if vendor is not None:
            found[vendor] = found.get(vendor, 0) + _memory_of(card)
    for vendor in _PRIORITY:
        if vendor in found:
            return vendor, found[vendor]
    return "", 0


def _memory_of(card: Path) -> int:
    # Only AMD's driver tells through sysfs.
    try:
        return int((card / "device" / "mem_info_vram_total").read_text())
    except (OSError, ValueError):
        return 0


def capacity(path: Path) -> Capacity:
    """Everything there is, with the disk that holds `path`."""
    memory = psutil.virtual_memory()
    disk = psutil.disk_usage(str(path))
    vendor, total_vram = gpu()
    return Capacity(
        cores=cores(),
        total_vram=total_vram,
        available_vram=total_vram,
        total_ram=memory.total,
        available_ram=memory.available,
        total_disk=disk.total,
        available_disk=disk.free,
        gpu_vendor=vendor,
    )


def capability() -> str:
    return capability_of(platform(), *gpu())


def is_port_free(host: str, port: int) -> bool:
    """Whether a server could listen there now. Another process may still take it first."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except (OSError, OverflowError):
            return False
    return True
