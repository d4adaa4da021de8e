"""Detection of graphics cards without vendor libraries: sysfs, `nvidia-smi`, the device tree of NVIDIA boards, PATH.

Observes only; `core.capability` draws the conclusions. All functions block because they run tools, so callers on the
event loop use a thread. A tool that times out or prints invalid output counts as absent.
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

from enginehouse.core.capacity import GraphicsCard

_VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
_PRIORITY = ("nvidia", "amd", "intel")
_TOOLS = {
    "nvidia-smi": "nvidia",
    "rocm-smi": "amd",
    "xpu-smi": "intel",
    "intel_gpu_top": "intel",
    "vulkaninfo": "vulkan",
}
_UNIFIED = ("GB10", "Thor")  # NVIDIA chips with unified memory
_BOARDS = ("jetson", "tegra", "orin", "thor", "spark")
_FIELDS = ("index", "name", "memory.total", "memory.free", "driver_version")
# A separate query: an older tool does not know this field and would fail as a whole.
_COMPUTE_FIELDS = ("compute_cap",)
TOOL_SECONDS = 5.0  # a driver that is loading answers within two; a broken one never
KEPT_SECONDS = 30.0  # cache lifetime: heartbeats are more frequent than changes
MIB = 1024**2
MAX_NAME = 64  # characters of a card's name; frontends accept no more


class Graphics(Struct, frozen=True, kw_only=True):
    """The graphics cards of the chosen vendor. 0 and "" mean unknown."""

    vendor: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    driver: int = 0
    compute_capability: str = ""  # of the first NVIDIA card
    cards: tuple[GraphicsCard, ...] = ()  # not those that use the machine's memory


class DevicePaths(Struct, frozen=True, kw_only=True):
    """The paths and tools to examine."""

    cards: Path = Path("/sys/class/drm")
    board: Path = Path("/proc/device-tree/model")
    nvidia: Path = Path("/proc/driver/nvidia")
    nvidia_memory: Path = Path("/dev/nvidia-uvm")
    find_tool: Callable[[str], str | None] = shutil.which


def make_devices(places: DevicePaths) -> None:
    """Create the memory device of NVIDIA's driver if it is missing.

    The driver creates it at first use through a setuid program. A confined engine cannot gain root rights that way,
    so the device must exist before.
    """
    program = places.find_tool("nvidia-modprobe")
    if program is None or not places.nvidia.exists() or places.nvidia_memory.exists():
        return
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run([program, "-u", "-c", "0"], stdin=subprocess.DEVNULL, capture_output=True, timeout=TOOL_SECONDS)


class Watch:
    """A cache of the graphics cards, refreshed after `KEPT_SECONDS`."""

    def __init__(self, places: DevicePaths) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._seen: Graphics | None = None
        self._seen_at = 0.0

    def look(self, kept_seconds: float | None = None) -> Graphics:
        """Return what was seen at most so long ago."""
        with self._lock:
            now = time.monotonic()
            if self._seen is None or now - self._seen_at > (KEPT_SECONDS if kept_seconds is None else kept_seconds):
                self._seen, self._seen_at = observe(self._places), now
            return self._seen


def observe(places: DevicePaths) -> Graphics:
    """Detect the graphics cards in LocalAI's order: sysfs (NVIDIA, AMD, Intel), an NVIDIA board, tools on PATH."""
    found = cards_in(places.cards)
    is_board = _is_nvidia_board(places.board)
    tools = [vendor for tool, vendor in _TOOLS.items() if places.find_tool(tool)]
    vendor = next((one for one in _PRIORITY if one in found), "") or ("nvidia" if is_board else next(iter(tools), ""))
    if vendor == "nvidia":
        tool = places.find_tool("nvidia-smi")
        rows = _rows(tool, _FIELDS) if tool else []
        compute = _rows(tool, _COMPUTE_FIELDS) if tool and rows else []
        # Container images for NVIDIA include the tool; without a card it prints nothing.
        return _nvidia(rows, compute, is_board) if rows or is_board or "nvidia" in found else Graphics()
    seen = found.get(vendor, [])
    total = sum(card.total_vram or 0 for card in seen)
    # A driver that does not tell what is used counts as empty, as before there were single cards.
    free = sum((card.total_vram or 0) if card.available_vram is None else card.available_vram for card in seen)
    own = tuple(card for card in seen if card.total_vram)
    return Graphics(vendor=vendor, total_bytes=total, free_bytes=free, cards=own)


def cards_in(cards: Path) -> dict[str, list[GraphicsCard]]:
    """Return the cards per vendor, in the order of their numbers."""
    found: dict[str, list[GraphicsCard]] = {}
    for card in sorted(cards.glob("card*"), key=lambda one: (len(one.name), one.name)):
        if "-" in card.name:  # a connector of a card
            continue
        try:
            vendor = _VENDORS.get((card / "device" / "vendor").read_text().strip().lower())
        except OSError:
            continue
        if vendor is not None:
            known = found.setdefault(vendor, [])
            known.append(_card_at(card, len(known)))
    return found


def _card_at(card: Path, index: int) -> GraphicsCard:
    # AMD's driver reports it for the device, Intel's for the card; NVIDIA's does not report it.
    total = _number_in(card / "device" / "mem_info_vram_total") or _number_in(card / "lmem_total_bytes")
    used = _number_in(card / "device" / "mem_info_vram_used")
    available = max(0, total - used) if total and used is not None else None
    return GraphicsCard(index=index, total_vram=total or None, available_vram=available)


def _number_in(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _is_nvidia_board(model: Path) -> bool:
    try:
        text = model.read_bytes().decode("ascii", "replace").lower()
    except OSError:
        return False
    return "nvidia" in text and any(word in text for word in _BOARDS)


def _nvidia(rows: list[list[str]], compute: list[list[str]], is_board: bool) -> Graphics:
    total = free = driver = 0
    is_unified = is_board
    cards = tuple(
        GraphicsCard(
            index=int(row[0]) if row[0].isdecimal() else place,
            name=row[1][:MAX_NAME],
            total_vram=_mebibytes(row[2]) or None,
            available_vram=_mebibytes(row[3]) if row[3].isdecimal() else None,
        )
        for place, row in enumerate(rows)
    )
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
        cards=() if is_unified else cards,
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
    """Parse a size in MiB. A chip without memory of its own reports `[N/A]`, which is 0."""
    return int(text) * MIB if text.isdecimal() else 0
