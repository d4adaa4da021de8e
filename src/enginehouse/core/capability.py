"""What a machine can run: LocalAI's capability words, the order of a gallery's keys for each, and the platform of a
build.

Pure: `host` observes, `decide` concludes. A forced word is used unchanged, so the operator always decides.
"""

from __future__ import annotations

import re

from msgspec import Struct

from enginehouse.core.errors import Invalid
from enginehouse.core.name import shown

# Machine names as `uname -m` reports them, mapped to the names in image indexes.
_ARCHITECTURES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
FOUR_GIB = 4 * 1024**3  # LocalAI's threshold: GPU builds are not used below it
DISABLED = "disable"  # LocalAI's word for "no filter"
DEFAULT = "default"
_WORDS = (DEFAULT, "cpu", "nvidia", "nvidia-l4t", "amd", "intel", "vulkan", "metal", "darwin-x86", DISABLED)
GENERAL = (DEFAULT, "cpu")  # gallery keys for every machine without a more specific key
# The oldest driver that runs programs of a CUDA release, newest first (NVIDIA's compatibility table).
_DRIVER_FOR_CUDA = ((580, 13), (525, 12))


class Facts(Struct, frozen=True, kw_only=True):
    """Observed facts about a machine; 0 and "" mean not observed."""

    platform: str
    forced: str = ""
    forced_by: str = ""  # the source of the forced word
    gpu_vendor: str = ""
    total_vram: int = 0
    cuda_toolkits: tuple[int, ...] = ()  # major versions of the CUDA directories
    driver: int = 0  # major version of NVIDIA's driver


class Decision(Struct, frozen=True):
    capability: str
    reason: str


def check_capability(word: str) -> str:
    """Return a capability that somebody has given; raise `Invalid` for a word that no build is chosen by."""
    if word in _WORDS or re.fullmatch(r"nvidia(-l4t)?(-cuda-\d{2})?", word):
        return word
    near = ", ".join(_WORDS)
    raise Invalid(
        f"cannot use the capability {shown(word)}: it must be one of {near}, or of a CUDA release: nvidia-cuda-12, "
        "nvidia-l4t-cuda-12",
        code="invalid_setting",
        param="capability",
    )


def platform_of(system: str, machine: str) -> str:
    """A platform such as `linux/amd64`. Unknown machine names are kept, so that refusals show them."""
    machine = machine.lower()
    return f"{system.lower()}/{_ARCHITECTURES.get(machine, machine)}"


def capability_of(platform: str, gpu_vendor: str, total_vram: int) -> str:
    """The coarse rule for workers that report no capability."""
    if platform == "darwin/arm64":
        return "metal"
    if platform == "darwin/amd64":
        return "darwin-x86"
    if not gpu_vendor or total_vram <= FOUR_GIB:
        return DEFAULT
    return gpu_vendor


def decide(facts: Facts) -> Decision:
    """The capability of a machine and the reason, by LocalAI's rules in LocalAI's order."""
    if facts.forced:
        return Decision(facts.forced, f"forced by {facts.forced_by}")
    if facts.platform in ("darwin/arm64", "darwin/amd64"):
        return Decision(capability_of(facts.platform, "", 0), f"the platform is {facts.platform}")
    cuda = _cuda(facts)
    version, evidence = (f"-cuda-{cuda[0]}", f", {cuda[1]}") if cuda else ("", "")
    if facts.platform == "linux/arm64" and facts.gpu_vendor == "nvidia":
        # Memory is not checked: these machines share it with the processor.
        return Decision(f"nvidia-l4t{version}", f"an NVIDIA chip on {facts.platform}{evidence}")
    if not facts.gpu_vendor:
        return Decision(DEFAULT, "no graphics card was found")
    gibibytes = facts.total_vram / 1024**3
    if facts.total_vram <= FOUR_GIB:
        known = f"has {gibibytes:.1f} GiB" if facts.total_vram else "has an unknown amount"
        return Decision(DEFAULT, f"the graphics ({facts.gpu_vendor}) {known} of memory; builds for it need over 4 GiB")
    word = facts.gpu_vendor + (version if facts.gpu_vendor == "nvidia" else "")
    return Decision(word, f"graphics of {facts.gpu_vendor} with {gibibytes:.1f} GiB{evidence}")


def _cuda(facts: Facts) -> tuple[int, str] | None:
    """The CUDA release to choose builds for, and its evidence.

    Builds bring their own libraries, so the driver decides: in place of a toolkit, or as its limit.
    """
    if facts.gpu_vendor != "nvidia":
        return None
    runs = next((cuda for driver, cuda in _DRIVER_FOR_CUDA if facts.driver >= driver), 0)
    installed = [cuda for _, cuda in _DRIVER_FOR_CUDA if cuda in facts.cuda_toolkits]
    for cuda in installed:
        if not facts.driver or cuda <= runs:
            return cuda, f"/usr/local/cuda-{cuda} is installed"
    return (runs, f"driver {facts.driver}") if runs else None


def keys_for(capability: str) -> tuple[str, ...]:
    """The keys of a meta entry that serve a capability, best first.

    `nvidia` substitutes a missing key of one CUDA release, but not for `nvidia-l4t`: its builds are for amd64.
    """
    if capability == DISABLED:
        return GENERAL
    keys = [capability]
    family, sign, _ = capability.partition("-cuda-")
    if sign and family in ("nvidia", "nvidia-l4t"):
        keys.append(family)
    if capability == "metal":
        keys.append("metal-darwin-arm64")
    return tuple(dict.fromkeys((*keys, *GENERAL)))


def cuda_of(text: str) -> int:
    """The CUDA release in a name or an image tag; 0 if there is none."""
    found = re.search(r"cuda-?(\d{2})(?!\d)", text.lower())
    return int(found[1]) if found else 0


def too_new(capability: str, name: str, uri: str) -> str:
    """Why a build needs a newer CUDA than the machine has, or "": drivers run builds for older releases only."""
    has, needs = cuda_of(capability), cuda_of(name) or cuda_of(_tag(uri))
    return f"it is built for CUDA {needs}, this machine has {has}" if has and needs > has else ""


def why_unsuitable(capability: str, name: str, uri: str) -> str:
    """Why a build named `name` at `uri` clearly cannot run on a machine; "" if nothing indicates that.

    Only whole words count, and a build with `cpu` in its name runs everywhere: `cpu-mlx` is not an Apple build.
    """
    if capability == DISABLED:
        return ""
    words = set(re.split(r"[^a-z0-9]+", f"{name} {_tag(uri)}".lower()))
    is_cuda = "nvidia" in words or any(word.startswith("cuda") for word in words)
    if "cpu" in words:
        return ""
    if "l4t" in words:
        needs, fits = "an NVIDIA Jetson or another arm64 machine with an NVIDIA chip", _is_l4t(capability)
    elif is_cuda:
        # Builds without l4t in their names are made for amd64.
        needs, fits = "an NVIDIA graphics card", capability.startswith("nvidia") and not _is_l4t(capability)
    elif words & {"rocm", "hip", "hipblas", "amd"}:
        needs, fits = "an AMD graphics card", capability == "amd"
    elif words & {"sycl", "intel"}:
        needs, fits = "an Intel graphics card", capability == "intel"
    elif words & {"darwin", "metal", "mlx"}:
        needs, fits = "macOS", capability in ("metal", "darwin-x86")
    else:
        return ""
    return "" if fits else f"it needs {needs}, and the capability of this machine is {capability}"


def graphics_of(capability: str) -> str:
    """Whose graphics cards a capability names that builds are made for; "" for machines without, and for Macs."""
    family = capability.partition("-")[0]
    return family if family in ("nvidia", "amd", "intel", "vulkan") else ""


def is_for_processors(name: str, uri: str) -> bool:
    """Whether nothing in the name of a build says that it uses a graphics card."""
    return "vulkan" not in f"{name} {_tag(uri)}".lower() and not why_unsuitable(DEFAULT, name, uri)


def preferred_words(capability: str) -> tuple[str, ...]:
    """The words to look for in the names of alternative builds, best first."""
    for start, words in (
        ("nvidia-l4t", ("l4t", "vulkan", "cpu")),
        ("nvidia", ("cuda", "vulkan", "cpu")),
        ("amd", ("rocm", "hip", "vulkan", "cpu")),
        ("intel", ("sycl", "intel", "cpu")),
        ("metal", ("metal", "cpu")),
        ("darwin-x86", ("darwin-x86", "cpu")),
        ("vulkan", ("vulkan", "cpu")),
    ):
        if capability.startswith(start):
            cuda = cuda_of(capability)
            return (f"cuda{cuda}", *words) if cuda else words
    return ("cpu",)


def _is_l4t(capability: str) -> bool:
    return capability.startswith("nvidia-l4t")


def _tag(uri: str) -> str:
    """The part of an image reference that describes the build; registries and projects may have any name."""
    last = uri.rpartition("/")[2].partition("@")[0]
    return last.partition(":")[2] or last
