"""The choice among the files of a repository: which quantisation of a GGUF model fits the nodes, and its companions.

Pure. The middle of the road (four bits and a half) is preferred because quality falls quickly below it and size grows
quickly above it. The choice says what was chosen, why, and what else there is; a person can name another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from msgspec import Struct

from enginehouse.core.errors import Invalid
from enginehouse.core.progress import format_bytes

# In the order of preference where there is enough memory for all.
PREFERRED = (
    *("Q4_K_M", "Q4_K_XL", "Q4_K_L", "Q4_K_S", "Q4_0", "IQ4_XS", "IQ4_NL", "Q4_1", "MXFP4", "Q5_K_M", "Q5_K_S"),
    *("Q5_0", "Q5_1", "Q6_K", "Q8_0", "Q3_K_L", "Q3_K_M", "IQ3_M", "IQ3_S", "Q3_K_S", "IQ3_XS", "IQ3_XXS", "Q2_K"),
    *("IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "BF16", "F16", "F32"),
)
_LABEL = re.compile(
    r"(?:^|[-_.])((?:UD-)?I?Q[1-8](?:_(?:[01]|K|NL|XXS|XS|S|M))?(?:_(?:S|M|L|XL))?|BF16|F16|F32|FP16|MXFP4)(?=[-_.]|$)",
    re.IGNORECASE,
)
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
# A model needs its weights, a context and the buffers of the engine.
OVERHEAD, OVERHEAD_BYTES = 1.15, 400 * 1024**2
# What an engine reads from a repository of safetensors: no second copies of the weights in other formats.
DIRECTORY_PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken")
MAX_FILES = 500
_SHOWN = 12


class RepositoryFile(Struct, frozen=True):
    path: str
    size_bytes: int = 0
    sha256: str = ""


class GgufChoice(Struct, frozen=True, kw_only=True):
    files: tuple[RepositoryFile, ...]  # all parts, in order
    projector: RepositoryFile | None
    quantization: str
    reason: str
    is_too_large: bool = False


class _Build(Struct, frozen=True, kw_only=True):
    label: str
    files: tuple[RepositoryFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def label_of(path: str) -> str:
    """The quantisation that a file's name tells; its name without ending if it tells none."""
    name = path.rpartition("/")[2]
    found = _LABEL.findall(name)
    if found:
        label = str(found[-1]).upper().removeprefix("UD-")
        return "F16" if label == "FP16" else label
    return _PART.sub("", name).removesuffix(".gguf")


def memory_needed(size_bytes: int) -> int:
    return int(size_bytes * OVERHEAD) + OVERHEAD_BYTES


def choose_gguf(
    files: Iterable[RepositoryFile], memory_bytes: Sequence[int], *, wanted: str = "", repository: str = ""
) -> GgufChoice | None:
    """Choose a build for nodes with this much free memory each; None if there is no GGUF model among the files."""
    every = [file for file in files if file.path.lower().endswith(".gguf")]
    projectors = [file for file in every if "mmproj" in file.path.lower()]
    builds = _builds(file for file in every if file not in projectors)
    if not builds:
        return None
    if wanted:
        chosen, reason = _named(builds, wanted, repository), f"{wanted} was asked for"
        is_too_large = False
    else:
        chosen, reason, is_too_large = _fitting(builds, max(memory_bytes, default=0))
    others = [f"{one.label} ({format_bytes(one.size_bytes)})" for one in builds if one is not chosen]
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    offered = f"; there are also {', '.join(others[:_SHOWN])}{more}" if others else ""
    return GgufChoice(
        files=chosen.files,
        projector=_projector(projectors),
        quantization=chosen.label,
        reason=f"chose {chosen.label} ({format_bytes(chosen.size_bytes)}): {reason}{offered}",
        is_too_large=is_too_large,
    )


def _builds(files: Iterable[RepositoryFile]) -> list[_Build]:
    """Complete builds by size: parts of one file belong together, and an incomplete set is left out."""
    groups: dict[str, list[RepositoryFile]] = {}
    counts: dict[str, int] = {}
    for file in files:
        part = _PART.search(file.path)
        key = _PART.sub("", file.path) if part else file.path
        groups.setdefault(key, []).append(file)
        counts[key] = int(part[2]) if part else 1
    builds = [
        _Build(label=label_of(key), files=tuple(sorted(group, key=lambda file: file.path)))
        for key, group in groups.items()
        if len(group) == counts[key]
    ]
    return sorted(builds, key=lambda build: (build.size_bytes, build.files[0].path))


def _named(builds: list[_Build], wanted: str, repository: str) -> _Build:
    for build in builds:
        if build.label.upper() == wanted.upper():
            return build
    known = ", ".join(dict.fromkeys(build.label for build in builds))
    raise Invalid(
        f"cannot find the quantisation {wanted} in {repository or 'the repository'}: it has {known}",
        code="not_found",
        param="source",
    )


def _fitting(builds: list[_Build], free_bytes: int) -> tuple[_Build, str, bool]:
    ranks = {label: rank for rank, label in enumerate(PREFERRED)}
    if len(builds) == 1:
        return _only(builds[0], free_bytes)
    ranked = sorted(builds, key=lambda build: (ranks.get(build.label, len(ranks)), build.size_bytes))
    if not free_bytes:
        return ranked[0], "the memory of no node is known, and this is the usual middle", False
    free = format_bytes(free_bytes)
    for build in ranked:
        if memory_needed(build.size_bytes) <= free_bytes:
            why = "the usual middle" if build is ranked[0] else "the best of those that fit"
            return build, f"{why}, and it fits a node with {free} of free memory", False
    return builds[0], f"it is the smallest, and still too large for a node with {free} of free memory", True


def _only(build: _Build, free_bytes: int) -> tuple[_Build, str, bool]:
    if not free_bytes:
        return build, "it is the only one, and the memory of no node is known", False
    is_too_large = memory_needed(build.size_bytes) > free_bytes
    fits = "too large for" if is_too_large else "it fits"
    return build, f"it is the only one, and {fits} a node with {format_bytes(free_bytes)} of free memory", is_too_large


def _projector(files: list[RepositoryFile]) -> RepositoryFile | None:
    """The companion of a model that sees: F16 is what most engines expect."""
    ranks = {"F16": 0, "BF16": 1, "Q8_0": 2, "F32": 3}
    return min(files, key=lambda file: (ranks.get(label_of(file.path), 9), file.path), default=None)


def choose_directory(
    files: Iterable[RepositoryFile], allow: Sequence[str] = (), ignore: Sequence[str] = ()
) -> tuple[RepositoryFile, ...]:
    """The files that an engine needs that reads a directory; () if there are no weights among them.

    Patterns are those of the hub: `*` also matches `/`. Without `allow`, weights as safetensors and all small files.
    """
    every = list(files)
    wanted = allow or DIRECTORY_PATTERNS
    chosen = [
        file
        for file in every
        if any(fnmatchcase(file.path, pattern) for pattern in wanted)
        and not any(fnmatchcase(file.path, pattern) for pattern in ignore)
        and not any(part.startswith(".") for part in file.path.split("/"))
    ]
    if not allow and not any(file.path.endswith(".safetensors") for file in chosen):
        return ()
    if len(chosen) > MAX_FILES:
        raise Invalid(
            f"cannot use the repository: {len(chosen)} files are chosen, at most {MAX_FILES} are allowed; narrow "
            "`allow_patterns`",
            code="too_large",
            param="source",
        )
    return tuple(chosen)
