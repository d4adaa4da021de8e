"""LocalAI's real gallery index, where it stands beside the project."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from enginehouse.core.gallery_entry import Gallery
from enginehouse.fetch.galleries.documents import read_backends

SHARED = Path(os.environ.get("ENGINEHOUSE_SHARED") or Path(__file__).parents[3] / "shared")
INDEX = SHARED / "data" / "localai-backend-index.yaml"


@cache
def localai() -> Gallery:
    entries, skipped = read_backends(INDEX.read_bytes(), "localai")
    return Gallery(name="localai", url="https://index.localai.io/backends", backends=entries, skipped=skipped)


def needs_index(function: Any) -> Any:
    return pytest.mark.skipif(not SHARED.is_dir(), reason="a user's checkout has no index")(function)
