"""What a machine can run: LocalAI's capability words and the platform of a build."""

from __future__ import annotations

# What `uname -m` and friends say, in the words of image indexes.
_ARCHITECTURES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
FOUR_GIB = 4 * 1024**3  # LocalAI's line: a GPU with less is not worth a GPU build


def platform_of(system: str, machine: str) -> str:
    """`linux/amd64` and the like; unknown machines keep their own word, so they are named in refusals."""
    machine = machine.lower()
    return f"{system.lower()}/{_ARCHITECTURES.get(machine, machine)}"


def capability_of(platform: str, gpu_vendor: str, total_vram: int) -> str:
    """The coarse rule for a machine (and for workers that report none); CUDA versions are told apart by the gallery
    work.
    """
    if platform == "darwin/arm64":
        return "metal"
    if platform == "darwin/amd64":
        return "darwin-x86"
    if not gpu_vendor or total_vram <= FOUR_GIB:
        return "default"
    return gpu_vendor
