"""Wheels as bytes: the files of a package and what describes it become one installable archive.

It must not read anything itself: `host.program` gives it the files. The same files give the same bytes on every machine
and Python, so nothing is compressed (compressors differ) and no time or owner is stored.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import Mapping, Sequence

from msgspec import Struct

_FIRST_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest that the format knows
_MODE = 0o100644


class PackageFacts(Struct, frozen=True, kw_only=True):
    """What the archive says of the package."""

    name: str
    version: str
    summary: str
    license: str
    requires_python: str
    requirements: Sequence[str]
    commands: Mapping[str, str]  # name of a command to `module:function`


class PinnedWheel(Struct, frozen=True):
    """A wheel of a package index, by the hashes that its file may have."""

    name: str
    version: str
    hashes: tuple[str, ...]

    @property
    def file_name(self) -> str:
        return f"{self.name}-{self.version}-py3-none-any.whl"

    @property
    def requirement(self) -> str:
        return " ".join((f"{self.name}=={self.version}", *(f"--hash=sha256:{one}" for one in self.hashes)))


def wheel_name(facts: PackageFacts) -> str:
    return f"{facts.name}-{facts.version}-py3-none-any.whl"


def wheel_bytes(facts: PackageFacts, files: Mapping[str, bytes]) -> bytes:
    """`files` by their path in the archive, with the directory of the package."""
    described = f"{facts.name}-{facts.version}.dist-info"
    every = {
        **{name: files[name] for name in sorted(files)},
        f"{described}/METADATA": _metadata(facts).encode(),
        f"{described}/WHEEL": b"Wheel-Version: 1.0\nGenerator: enginehouse\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{described}/entry_points.txt": _entry_points(facts).encode(),
    }
    record = f"{described}/RECORD"
    lines = [*(_recorded(name, content) for name, content in every.items()), f"{record},,"]
    every[record] = ("\n".join(lines) + "\n").encode()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for name, content in every.items():
            entry = zipfile.ZipInfo(name, _FIRST_TIME)
            entry.create_system, entry.external_attr = 3, _MODE << 16
            archive.writestr(entry, content)
    return made.getvalue()


def _metadata(facts: PackageFacts) -> str:
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {facts.name}",
        f"Version: {facts.version}",
        f"Summary: {facts.summary}",
        f"License: {facts.license}",
        *(f"Requires-Dist: {one}" for one in sorted(facts.requirements)),
        f"Requires-Python: {facts.requires_python}",
    ]
    return "\n".join(lines) + "\n"


def _entry_points(facts: PackageFacts) -> str:
    return "[console_scripts]\n" + "".join(f"{name} = {aim}\n" for name, aim in sorted(facts.commands.items()))


def _recorded(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    quoted = f'"{name}"' if "," in name else name
    return f"{quoted},sha256={digest},{len(content)}"
