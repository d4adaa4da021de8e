"""How many cores are in use, on counters as the system gives them and on those of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from enginehouse.host import processors
from enginehouse.host.processors import ProcessorWatch, busy_seconds_here


def watch(*looks: tuple[float, float]) -> ProcessorWatch:
    """One that reads these times and counters, one after the other."""
    times: Iterator[float] = iter([at for at, _ in looks])
    busy: Iterator[float] = iter([seconds for _, seconds in looks])
    return ProcessorWatch(lambda: next(busy), lambda: next(times))


def test_the_first_look_knows_nothing_and_the_next_ones_the_time_in_between() -> None:
    seen = watch((0.0, 100.0), (10.0, 112.0), (20.0, 112.0))
    assert [seen.look(4), seen.look(4), seen.look(4)] == [None, 1.2, 0.0]


def test_two_looks_at_once_show_the_same() -> None:
    seen = watch((0.0, 0.0), (10.0, 5.0), (10.2, 5.19), (20.0, 30.0))
    assert [seen.look(4) for _ in range(4)] == [None, 0.5, 0.5, 2.5]


def test_no_more_cores_are_in_use_than_there_are() -> None:
    seen = watch((0.0, 0.0), (10.0, 20.4))
    seen.look(2)
    assert seen.look(2) == 2.0


def test_counters_that_went_back_are_not_taken_for_a_figure() -> None:
    seen = watch((0.0, 100.0), (10.0, 20.0), (20.0, 30.0))
    assert [seen.look(4), seen.look(4), seen.look(4)] == [None, None, 1.0]


def test_what_cannot_be_read_is_unknown() -> None:
    counters: Iterator[float] = iter([1.0, 2.0])

    def broken() -> float:
        if (found := next(counters, None)) is None:
            raise OSError("gone")
        return found

    times = iter(range(0, 100, 10))
    seen = ProcessorWatch(broken, lambda: float(next(times)))
    assert [seen.look(4), seen.look(4), seen.look(4)] == [None, 0.1, None]


def test_a_container_with_a_quota_counts_what_runs_in_it(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 12500000\nuser_usec 1\n")
    assert busy_seconds_here(tmp_path) == 12.5
    (tmp_path / "cpu.stat").write_text("nothing 1\n")
    with pytest.raises(ValueError, match="processor time"):
        busy_seconds_here(tmp_path)


@pytest.mark.parametrize("quota", ["max 100000\n", None])
def test_without_a_quota_the_processors_of_the_machine_are_counted(tmp_path: Path, quota: str | None) -> None:
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    (tmp_path / "cpu.stat").write_text("usage_usec 1\n")
    assert busy_seconds_here(tmp_path) > 0.001


def test_work_on_this_machine_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "SHORTEST_SECONDS", 0.2)
    seen = ProcessorWatch()
    assert seen.look(1024) is None
    used = None
    while used is None:
        sum(range(100_000))
        used = seen.look(1024)
    assert 0.1 < used <= 1024
