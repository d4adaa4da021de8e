"""What the package cache has is installed without asking anybody."""

from __future__ import annotations

import os
from pathlib import Path

from enginehouse.fetch.galleries.sources import load_builtin
from enginehouse.fetch.pypi import Python

SMALL = load_builtin().backends[1].requirements[1]  # pykdtree, half a megabyte


def silent(done: int, total: int) -> None:
    """Progress that nobody hears."""


async def test_a_package_that_is_in_the_cache_needs_no_network(tmp_path: Path) -> None:
    cached = os.environ | {"UV_CACHE_DIR": str(tmp_path / "cache")}
    # The cache belongs to an index, so the index stays and the way to it is cut.
    cut_off = cached | dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    cut_off |= {name.upper(): value for name, value in cut_off.items() if name.endswith("_proxy")}
    cut_off |= {"no_proxy": "", "NO_PROXY": "", "UV_HTTP_RETRIES": "0"}
    for name, environment in (("first", cached), ("second", cut_off)):
        python = Python(environment)
        await python.make_environment(tmp_path / name)
        await python.install(tmp_path / name, [SMALL], size_bytes=1, progress=silent)
        assert list((tmp_path / name).glob("lib/python*/site-packages/pykdtree/__init__.py"))
