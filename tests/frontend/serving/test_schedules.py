"""Schedules of a file, which a frontend stores at each start."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.frontend.world import World

from enginehouse.build_outside import store_schedules
from enginehouse.core.errors import Invalid


async def test_a_file_of_schedules_replaces_those_of_its_models_at_each_start(world: World, tmp_path: Path) -> None:
    file = tmp_path / "schedules.yaml"
    file.write_text("- model_name: tiny\n  min_replicas: 2\n- {model_name: not-here, min_replicas: 1}\n")
    for number in (2, 3):
        await store_schedules(world.schedules, file)
        (stored,) = await world.schedules.every()
        assert (stored.schedule.model_name, stored.schedule.min_replicas) == ("tiny", number)
        file.write_text('[{"model_name": "tiny", "min_replicas": 3}]')
    await store_schedules(world.schedules, None)
    assert len(await world.schedules.every()) == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("- model_name: tiny\n  min_replicas: 2\n  max_replicas: 1\n", "min_replicas"),
        ("- model_name: tiny\n  replicas: 1\n", "replicas"),
        ("- [1]\n", "mapping"),
        ("a: [", "YAML"),
    ],
)
async def test_a_file_with_one_schedule_that_cannot_be_used_stores_none(
    world: World, tmp_path: Path, text: str, why: str
) -> None:
    file = tmp_path / "schedules.yaml"
    file.write_text("- {model_name: tiny, min_replicas: 1}\n" + text)
    with pytest.raises(Invalid, match=why):
        await store_schedules(world.schedules, file)
    assert await world.schedules.every() == []
    with pytest.raises(Invalid, match="cannot read the schedules"):
        await store_schedules(world.schedules, tmp_path / "absent")
