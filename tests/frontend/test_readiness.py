"""A full disk under the database: said to whoever writes, and the frontend is not ready until there is room."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import pytest
from tests.conftest import SMALL_DISK_BYTES

from enginehouse.core.errors import Unavailable
from enginehouse.core.model import Model
from enginehouse.frontend.readiness import FULL_BYTES, full_disk
from enginehouse.host import disk
from enginehouse.store import models
from enginehouse.store.db import Store


def fill(place: Path) -> Path:
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for _ in range(SMALL_DISK_BYTES):
            file.write(b"x" * 65536)
    return filler


async def add_many(store: Store) -> None:
    for number in range(50):
        large = Model(name=f"m{number}", backend="b", files=(), description="x" * 200_000)
        await store.transaction(partial(models.insert, model=large, now=1.0))


async def test_a_full_disk_is_said_and_over_when_there_is_room(small_disk: Path) -> None:
    store = await Store.open(f"sqlite:///{small_disk / 'enginehouse.db'}")
    try:
        assert full_disk(small_disk) == []
        filler = fill(small_disk)
        (reason,) = full_disk(small_disk)
        assert f"the disk of {small_disk} is full" in reason
        with pytest.raises(Unavailable, match="the disk of the database is full") as caught:
            await add_many(store)
        assert caught.value.code == "store_unavailable"
        assert store.is_full
        assert not store.is_away, "reads go on"
        assert isinstance(await store.read(lambda connection: len(models.every(connection))), int)
        filler.unlink()
        assert full_disk(small_disk) == []
        assert disk.free_bytes(small_disk) > FULL_BYTES
    finally:
        store.close()


def test_a_data_directory_that_is_gone_is_a_reason_too(tmp_path: Path) -> None:
    assert "cannot be used" in full_disk(tmp_path / "gone")[0]
