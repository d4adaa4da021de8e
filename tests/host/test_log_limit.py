"""A log that nobody outside can fill."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from enginehouse.host.log_limit import (
    ALL_BYTES,
    ALL_PER_SECOND,
    LINE_CHARACTERS,
    LOG_COUNT_SECONDS,
    PLACE_BYTES,
    PLACE_PER_SECOND,
    LimitedHandler,
)

FLOOD = 100_000


class Log:
    def __init__(self) -> None:
        self.now = 0.0
        self.stream = io.StringIO()
        self.handler = LimitedHandler(self.stream, lambda: self.now)
        self.handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
        self.logger = logging.Logger("enginehouse.tests", logging.INFO)
        self.logger.addHandler(self.handler)

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    def flood(self, lines: int = FLOOD) -> None:
        for number in range(lines):
            self.logger.warning("reply.dropped subject=%s error=%s", number, "nonsense")


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    yield made
    made.handler.close()


def test_a_flood_from_one_place_is_bounded_and_counted(log: Log) -> None:
    log.flood()
    assert len(log.text) <= PLACE_BYTES
    told = log.text.count("reply.dropped")
    assert told > 1000, "a thousand nodes may cause as many lines at once"
    log.now += 1.0
    log.flood(1)
    assert f"log.left_out event=reply.dropped lines={FLOOD - told}" in log.text
    for _ in range(100):
        log.now += 1.0
        log.flood(1000)
    assert len(log.text) <= PLACE_BYTES + 102 * (PLACE_PER_SECOND + 200)


def test_a_flood_from_one_place_hides_no_other(log: Log) -> None:
    log.flood()
    log.logger.error("nodes.mass_loss lost=3 of=4")
    assert "nodes.mass_loss" in log.text


def test_what_was_left_out_is_told_although_that_place_says_nothing_more(log: Log) -> None:
    log.flood()
    log.now += 1.5 * LOG_COUNT_SECONDS
    log.logger.info("something.else")
    assert "log.left_out event=reply.dropped" in log.text


def test_what_was_left_out_is_told_at_the_end(log: Log) -> None:
    log.flood()
    log.handler.close()
    assert "log.left_out event=reply.dropped" in log.text


def test_all_places_together_are_bounded(log: Log) -> None:
    for number in range(40):
        record = logging.LogRecord("many", logging.WARNING, __file__, number, "x" * 1000, None, None)
        for _ in range(1000):
            log.handler.emit(record)
    assert len(log.text) <= ALL_BYTES
    log.now += 10.0
    for number in range(40):
        record = logging.LogRecord("many", logging.WARNING, __file__, number, "x" * 1000, None, None)
        for _ in range(1000):
            log.handler.emit(record)
    assert len(log.text) <= ALL_BYTES + 10 * ALL_PER_SECOND + 10_000


def test_one_line_is_one_line_whatever_was_put_into_it(log: Log) -> None:
    log.logger.warning("reply.dropped error=%s", "a\nWARNING enginehouse.forged b\r" + "x" * 1_000_000)
    assert log.text.count("\n") == 1
    assert len(log.text) < LINE_CHARACTERS + 200
    assert "(1000" in log.text


def test_a_traceback_is_kept_to_its_end_and_counted(log: Log) -> None:
    try:
        raise ValueError("y" * 1_000_000)
    except ValueError:
        for _ in range(1000):
            log.logger.exception("request.failed")
    assert "request.failed" in log.text
    assert len(log.text) <= PLACE_BYTES
