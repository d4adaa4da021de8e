"""This program as other machines get it: its wheel, and the script that installs it there and joins them.

It must reveal nothing but the program: no address, setting or token of this machine is in either. The address of the
server is an argument of the line that people paste, so nothing that a client sent can get into the script. The files of
the installed package are the source, so a checkout and an installed wheel hand out the same bytes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from pathlib import Path

from msgspec import Struct

from enginehouse import __version__
from enginehouse.core.errors import Hopeless
from enginehouse.core.wheel import PackageFacts, PinnedWheel, wheel_bytes, wheel_name

NAME = "enginehouse"
PACKAGE = Path(__file__).parents[1]
_SCRIPT = Path(__file__).with_name("join.sh")
_PIP = PACKAGE / "pip.txt"
_LEFT_OUT = frozenset({"__pycache__", ".DS_Store"})
_LEFT_OUT_ENDINGS = (".pyc", ".pyo", ".orig", ".rej", ".swp", "~")


class Program(Struct, frozen=True, kw_only=True):
    """What a server hands out of itself."""

    wheel_name: str
    wheel: bytes
    wheel_sha256: str
    script: bytes
    script_sha256: str


def read_program() -> Program:
    """Make the wheel and the script from the files of this package. Blocks for a tenth of a second."""
    facts = package_facts()
    wheel = wheel_bytes(facts, package_files())
    digest, pip = hashlib.sha256(wheel).hexdigest(), pinned_pip()
    values = {
        "VERSION": facts.version,
        "WHEEL": wheel_name(facts),
        "WHEEL_SHA256": digest,
        "PIP_WHEEL": pip.file_name,
        "PIP_SHA256": " ".join(pip.hashes),
    }
    script = re.sub(r"@([A-Z0-9_]+)@", lambda found: values[found[1]], _SCRIPT.read_text()).encode()
    return Program(
        wheel_name=values["WHEEL"],
        wheel=wheel,
        wheel_sha256=digest,
        script=script,
        script_sha256=hashlib.sha256(script).hexdigest(),
    )


def package_files(package: Path = PACKAGE) -> dict[str, bytes]:
    """The files of the package by their path in a wheel; without what editors and Python leave behind."""
    return {
        path.relative_to(package.parent).as_posix(): path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and not _LEFT_OUT & set(path.parts) and not path.name.endswith(_LEFT_OUT_ENDINGS)
    }


def package_facts() -> PackageFacts:
    try:
        found = importlib.metadata.metadata(NAME)
        commands = importlib.metadata.entry_points(group="console_scripts")
    except importlib.metadata.PackageNotFoundError:
        raise Hopeless(
            "cannot make the wheel of this program: it is not installed; install it with `make setup` or pip"
        ) from None
    return PackageFacts(
        name=NAME,
        version=__version__,
        summary=found["Summary"] or "",
        license=found["License-Expression"] or found["License"] or "",
        requires_python=found["Requires-Python"] or "",
        requirements=[one for one in found.get_all("Requires-Dist") or () if "extra ==" not in one],
        commands={one.name: one.value for one in commands if one.value.partition(".")[0] == NAME},
    )


def pinned_pip() -> PinnedWheel:
    """The pip for machines whose Python has none."""
    name, version, rest = re.split(r"==|\s", _PIP.read_text().strip(), maxsplit=2)
    return PinnedWheel(name, version, tuple(re.findall(r"sha256:([0-9a-f]{64})", rest)))
