"""What unpacking takes of the memory, measured in a process of its own: not more for larger layers, nor for bombs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import sys
from pathlib import Path

from tests.fetch.images import compress
from tests.artifact.archives import file, header
from tests.artifact.images.test_inflate import Endless

from enginehouse.core.archive import ArchiveLimits
from enginehouse.core.artifact import Layer
from enginehouse.core.errors import Hopeless
from enginehouse.artifact.images.inflate import Inflating
from enginehouse.artifact.images.sharing import Sharing
from enginehouse.artifact.images.tar import TarStream
from enginehouse.artifact.images.layers import Unpacker

MIB = 1024 * 1024
what, compression, root = sys.argv[1], sys.argv[2], Path(sys.argv[3])


def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


class Once:
    # 300 MiB in one file and many, without ever being in memory.
    def __init__(self):
        noise = bytes(range(256)) * 4096
        self.parts = [compress(header("large", size=200 * MIB), compression)]
        self.parts += [compress(noise, compression)] * 200
        self.parts += [compress(file(f"{index}", noise), compression) for index in range(100)]
        self.held = b""

    def read(self, size=-1, /):
        while self.parts and len(self.held) < size:
            self.held += self.parts.pop(0)
        taken, self.held = self.held[:size], self.held[size:]
        return taken


if what == "layer":
    source, limits = Once(), ArchiveLimits(ratio=10**9)
else:
    source = Endless(compress(header("a", size=10 * 2**30), compression), compress(bytes(16 * MIB), compression))
    limits = ArchiveLimits(total_bytes=150 * MIB, ratio=10**9)
layer = Layer(digest="sha256:" + "0" * 64, size_bytes=10 * MIB, compression=compression)
before = peak_bytes()
with Unpacker(root, Sharing(), limits) as unpacker, Inflating(layer, source, limits, limits.total_bytes) as inflating:
    try:
        unpacker.apply(TarStream(inflating.next_buffer), lambda: False)
    except Hopeless as error:
        assert error.code == "archive_too_large", error
print(peak_bytes() - before, sum(path.stat().st_size for path in root.iterdir()))
"""


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
@pytest.mark.parametrize(("what", "most_mib", "written_mib"), [("layer", 60, 300), ("bomb", 100, 150)])
def test_memory_is_bounded(what: str, compression: str, most_mib: int, written_mib: int, tmp_path: Path) -> None:
    assert Path("/proc/self/status").exists(), "this is measured on Linux"
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, what, compression, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    grown, written = (int(part) for part in done.stdout.split())
    assert grown < most_mib * 1024 * 1024
    assert (written_mib - 2) * 1024 * 1024 < written < (written_mib + 1) * 1024 * 1024
