"""Files of frames: a frame is good in its own place only."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginehouse.core.errors import Invalid
from enginehouse.host import sealed_file

MAGIC = b"test\n"


@pytest.mark.parametrize("passphrase", ["", "correct horse"])
def test_frames_that_changed_places_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passphrase: str
) -> None:
    monkeypatch.setattr(sealed_file, "MEMORY_BYTES", 8192)
    path = tmp_path / "file"
    sealed_file.write(path, MAGIC, {}, [b"one", b"two"], passphrase)
    assert list(sealed_file.read(path, MAGIC, "test", passphrase)) == [b"one", b"two", b""]
    content = path.read_bytes()
    at = len(MAGIC) + 4 + int.from_bytes(content[len(MAGIC) : len(MAGIC) + 4], "big")
    size = 5 + int.from_bytes(content[at : at + 4], "big")
    first, second, rest = content[at : at + size], content[at + size : at + 2 * size], content[at + 2 * size :]
    path.write_bytes(content[:at] + second + first + rest)
    with pytest.raises(Invalid, match="cut off or altered"):
        list(sealed_file.read(path, MAGIC, "test", passphrase))
