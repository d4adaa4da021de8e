"""Graphics of this machine, as far as they can be known without a library of a vendor: sysfs, `nvidia-smi`, the
device tree of an NVIDIA board, the tools on PATH.

Only observes; what follows from it is `core.capability`'s. Everything blocks (a tool is run), so callers on the event
loop go through a thread. A tool that hangs or talks nonsense counts as absent.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from msgspec import Struct

_VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
_PRIORITY = ("nvidia", "amd", "intel")
_TOOLS = {
    "nvidia-smi": "nvidia",
    "rocm-smi": "amd",
    "xpu-smi": "intel",
    "intel_gpu_top": "intel",
    "vulkaninfo": "vulkan",
}
_UNIFIED = ("GB10", "Thor")  # NVIDIA's chips that share the memory of the machine
_BOARDS = ("jetson", "tegra", "orin", "thor", "spark")
_FIELDS = ("index", "name", "memory.total", "memory.free", "driver_version")
# Asked apart: an older tool does not know it, and then answers nothing at all.
_COMPUTE_FIELDS = ("compute_cap",)
TOOL_SECONDS = 5.0  # a driver that is being loaded answers within two; a broken one never
KEPT_SECONDS = 30.0  # heartbeats come more often than the answer changes
MIB = 1024**2


class Graphics(Struct, frozen=True, kw_only=True):
    """Of the vendor that counts; 0 and "" mean "not known"."""

    vendor: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    driver: int = 0
    compute_capability: str = ""  # of NVIDIA's first card


class DevicePaths(Struct, frozen=True, kw_only=True):
    """Where to look."""

    cards: Path = Path("/sys/class/drm")
    board: Path = Path("/proc/device-tree/model")
    nvidia: Path = Path("/proc/driver/nvidia")
    nvidia_memory: Path = Path("/dev/nvidia-uvm")
    find_tool: Callable[[str], str | None] = shutil.which


def make_devices(places: DevicePaths) -> None:
    """Have NVIDIA's memory device, which its driver makes on first use with a program that is root's. A confined engine
    cannot become root, not even that way, so it must be there before.
    """
    program = places.find_tool("nvidia-modprobe")
    if program is None or not places.nvidia.exists() or places.nvidia_memory.exists():
        return
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run([program, "-u", "-c", "0"], stdin=subprocess.DEVNULL, capture_output=True, timeout=TOOL_SECONDS)


class Watch:
    """The graphics, looked at again when the last look is older than `KEPT_SECONDS`."""

    def __init__(self, places: DevicePaths) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._seen: Graphics | None = None
        self._seen_at = 0.0

    def look(self) -> Graphics:
        with self._lock:
            now = time.monotonic()
            if self._seen is None or now - self._seen_at > KEPT_SECONDS:
                self._seen, self._seen_at = observe(self._places), now
            return self._seen


def observe(places: DevicePaths) -> Graphics:
    """LocalAI's order: cards in sysfs (NVIDIA before AMD before Intel), an NVIDIA board, tools on PATH."""
    found = cards_in(places.cards)
    is_board = _is_nvidia_board(places.board)
    tools = [vendor for tool, vendor in _TOOLS.items() if places.find_tool(tool)]
    vendor = next((one for one in _PRIORITY if one in found), "") or ("nvidia" if is_board else next(iter(tools), ""))
    if vendor == "nvidia":
        tool = places.find_tool("nvidia-smi")
        rows = _rows(tool, _FIELDS) if tool else []
        compute = _rows(tool, _COMPUTE_FIELDS) if tool and rows else []
        # Images for NVIDIA bring the tool along; without a card it says nothing.
        return _nvidia(rows, compute, is_board) if rows or is_board or "nvidia" in found else Graphics()
    total = found.get(vendor, 0)
    return Graphics(vendor=vendor, total_bytes=total, free_bytes=total)


def cards_in(cards: Path) -> dict[str, int]:
    """The memory of the cards of each vendor."""
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
    return found


def _memory_of(card: Path) -> int:
    # AMD's driver tells it with the device, Intel's with the card; NVIDIA's not at all.
    for file in (card / "device" / "mem_info_vram_total", card / "lmem_total_bytes"):
        try:
            return int(file.read_text())
        except (OSError, ValueError):
            continue
    return 0


def _is_nvidia_board(model: Path) -> bool:
    try:
        text = model.read_bytes().decode("ascii", "replace").lower()
    except OSError:
        return False
    return "nvidia" in text and any(word in text for word in _BOARDS)


def _nvidia(rows: list[list[str]], compute: list[list[str]], is_board: bool) -> Graphics:
    total = free = driver = 0
    is_unified = is_board
    for row in rows:
        total += _mebibytes(row[2])
        free += _mebibytes(row[3])
        major = row[4].partition(".")[0]
        driver = max(driver, int(major) if major.isdecimal() else 0)
        is_unified = is_unified or any(word in row[1] for word in _UNIFIED)
    if is_unified:
        memory = psutil.virtual_memory()
        total, free = memory.total, memory.available
    known = [row[0] for row in compute if row[0].replace(".", "", 1).isdecimal()]  # not `[N/A]`
    return Graphics(
        vendor="nvidia",
        total_bytes=total,
        free_bytes=free,
        driver=driver,
        compute_capability=known[0] if known else "",
    )


def _rows(tool: str, fields: tuple[str, ...]) -> list[list[str]]:
    query = (f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(
            [tool, *query], capture_output=True, text=True, errors="replace", timeout=TOOL_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == len(fields)]


def _mebibytes(text: str) -> int:
    """`[N/A]` is what a chip without memory of its own says."""
    return int(text) * MIB if text.isdecimal() else 0
