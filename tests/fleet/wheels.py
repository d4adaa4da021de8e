"""A Python package that serves, as a wheel in a directory: what an index would offer, without one.

Workers that are told of the directory by `environment_of` ask nobody else. Nothing of it is built or run here.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

from tests.fleet.engines import program

PACKAGE = "enginehouse-test-speaker"  # a name that no index has
PACKAGED = "packaged"  # the backend; the gallery names a version of it that cannot be had
_MODULE = "enginehouse_test_speaker"


def write_wheel(directory: Path, version: str, says: str) -> None:
    """Its console entry point is an engine that says this."""
    directory.mkdir(parents=True, exist_ok=True)
    about = f"{_MODULE}-{version}.dist-info"
    # A launcher gives the address as the second word, as `run.sh --addr HOST:PORT` does.
    body = "".join(f"    {line}\n" for line in program(says).decode().splitlines()[1:])
    files = {
        f"{_MODULE}.py": f"def main():\n{body}",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": f"[console_scripts]\n{PACKAGE} = {_MODULE}:main\n",
    }
    record = "".join(f"{name},sha256={_digest(text)},{len(text.encode())}\n" for name, text in files.items())
    with zipfile.ZipFile(directory / f"{_MODULE}-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in (*files.items(), (f"{about}/RECORD", f"{record}{about}/RECORD,,\n")):
            wheel.writestr(name, text)


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def environment_of(directory: Path) -> dict[str, str]:
    """Of a worker that finds packages there and nowhere else."""
    return {"UV_FIND_LINKS": str(directory), "UV_OFFLINE": "1"}
