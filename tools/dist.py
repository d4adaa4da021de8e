"""Builds what is published: the wheel, with the bytes that a server hands out of itself, and the source archive.

    .venv/bin/python tools/dist.py [DIRECTORY]

uv builds the source archive; nothing is downloaded, because its build backend is a part of it. The wheel is not built
from that archive: its bytes must not depend on the version of a build tool.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import uv

from enginehouse.host.program import read_program

ROOT = Path(__file__).parents[1]


def main() -> int:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").resolve()
    target.mkdir(parents=True, exist_ok=True)
    made = read_program()
    wheel = target / made.wheel_name
    wheel.write_bytes(made.wheel)
    print(f"{wheel}  sha256 {made.wheel_sha256}")
    command = [uv.find_uv_bin(), "build", "--quiet", "--sdist", "--offline", "--out-dir", str(target), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"cannot build the source archive: {done.stderr.strip()}", file=sys.stderr)
        return 1
    print(next(str(path) for path in sorted(target.glob("*.tar.gz"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
