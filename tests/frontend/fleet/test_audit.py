"""The audit, on SQLite and PostgreSQL: nothing is lost that fits in memory, and what is lost or left out is counted."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from enginehouse.core.audit import AuditQuery, AuditRecord
from enginehouse.core.errors import NotFound, Unavailable
from enginehouse.frontend.fleet import audit as ledgers
from enginehouse.frontend.fleet.audit import BATCH, MOST_ADDRESSES, MOST_REFUSALS, WINDOW_SECONDS, AuditLedger
from enginehouse.store import audit, db
from enginehouse.store.db import Connection, Store

KEPT = 3600.0


class Moment:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def moment() -> Moment:
    return Moment()


@pytest.fixture
async def ledger(store: Store, moment: Moment) -> AuditLedger:
    return AuditLedger(store, moment, kept_seconds=KEPT)


@pytest.fixture
async def pair(database_url: str, moment: Moment) -> AsyncIterator[tuple[AuditLedger, AuditLedger]]:
    stores = [await Store.open(database_url) for _ in range(2)]
    yield AuditLedger(stores[0], moment, kept_seconds=KEPT), AuditLedger(stores[1], moment, kept_seconds=KEPT)
    for one in stores:
        one.close()


def record(path: str = "/api/tokens", status: int = 201, **fields: object) -> AuditRecord:
    given: dict[str, object] = {"who": "desk", "role": "admin", "address": "10.0.0.1", "method": "POST", **fields}
    return AuditRecord(id="", at=0.0, path=path, status=status, **given)  # type: ignore[arg-type]


async def listed(
    ledger: AuditLedger, limit: int = 500, *, who: str = "", path: str = "", before: str = ""
) -> list[AuditRecord]:
    return await ledger.page(AuditQuery(limit=limit, who=who, path=path, before=before))


async def test_what_both_frontends_record_is_one_list_newest_first(
    pair: tuple[AuditLedger, AuditLedger], moment: Moment
) -> None:
    for number, ledger in enumerate(pair * 2):
        moment.now += 1
        ledger.note(record(f"/api/{number}", operation_id=f"op-{number}"))
    for ledger in pair:
        await ledger.step()
    found = await listed(pair[1])
    assert [(one.path, one.at, one.operation_id) for one in found] == [
        (f"/api/{number}", 1_001.0 + number, f"op-{number}") for number in (3, 2, 1, 0)
    ]
    assert len({one.id for one in found}) == 4


async def test_pages_follow_each_other_also_within_one_moment(ledger: AuditLedger) -> None:
    for number in range(7):
        ledger.note(record(f"/api/{number}"))
    await ledger.step()
    everything, found, before = await listed(ledger), [], ""
    while True:
        page = await listed(ledger, 3, before=before)
        found += page
        if len(page) < 3:
            break
        before = page[-1].id
    assert found == everything
    assert len(found) == 7
    with pytest.raises(NotFound):
        await listed(ledger, before="nothing")


async def test_it_is_filtered_by_who_and_by_the_beginning_of_the_path(ledger: AuditLedger) -> None:
    ledger.note(record("/api/nodes/a", token_id="t1"))
    ledger.note(record("/api/nodes_b", who="other", session_id="s1"))
    ledger.note(record("/api/tokens", who="other"))
    await ledger.step()
    for who, path, paths in (
        ("desk", "", ["/api/nodes/a"]),
        ("t1", "", ["/api/nodes/a"]),
        ("s1", "", ["/api/nodes_b"]),
        ("other", "/api/t", ["/api/tokens"]),
        ("", "/api/nodes_", ["/api/nodes_b"]),
        ("", "%", []),
        ("nobody", "", []),
    ):
        assert [one.path for one in await listed(ledger, who=who, path=path)] == paths, (who, path)


async def test_texts_are_cut_and_cleaned_so_that_every_database_takes_them(ledger: AuditLedger) -> None:
    ledger.note(record("/api/\x00\n" + "x" * 10_000, target="ü" * 10_000, who="w" * 1000, address="a" * 100))
    await ledger.step()
    (found,) = await listed(ledger)
    assert found.path.startswith("/api/\ufffd\ufffdxxx")
    assert (len(found.path), len(found.target), len(found.who), len(found.address)) == (512, 512, 128, 64)


async def test_equal_requests_in_a_row_are_one_record_with_a_count(ledger: AuditLedger, moment: Moment) -> None:
    for _ in range(5):
        moment.now += 1
        ledger.note(record("/api/uploads/a", 200))
    ledger.note(record("/api/nodes/a/drain", 202, operation_id="op"))
    ledger.note(record("/api/nodes/a/drain", 202, operation_id="op"))
    await ledger.step()
    found = sorted((one.path, one.count, one.at) for one in await listed(ledger))
    assert found == [("/api/nodes/a/drain", 1, 1_005.0)] * 2 + [("/api/uploads/a", 5, 1_005.0)]


async def test_refusals_of_one_address_are_bounded_per_minute_and_counted(ledger: AuditLedger, moment: Moment) -> None:
    for number in range(MOST_REFUSALS + 25):
        ledger.note(record(f"/api/{number}", 401, who="", error="unauthenticated"))
    ledger.note(record("/api/x", 403, address="10.0.0.2"))
    await ledger.step()
    assert len(await listed(ledger)) == MOST_REFUSALS + 1
    moment.now += WINDOW_SECONDS
    await ledger.step()
    (pooled,) = [one for one in await listed(ledger) if one.count > 1]
    assert (pooled.count, pooled.address, pooled.status, pooled.path) == (25, "10.0.0.1", 401, "")
    assert pooled.summary.startswith("Further refused requests")
    for number in range(MOST_REFUSALS + 1):
        ledger.note(record(f"/api/nonsense/{number}", 422, role="", address="10.0.0.3"))
    await ledger.step()
    assert len(await listed(ledger, path="/api/nonsense")) == MOST_REFUSALS
    ledger.note(record("/api/again", 401))
    await ledger.finish()
    assert (await listed(ledger, path="/api/again"))[0].count == 1


async def test_addresses_beyond_a_number_are_counted_together(ledger: AuditLedger) -> None:
    for number in range(MOST_ADDRESSES + MOST_REFUSALS + 5):
        ledger.note(record(f"/api/{number}", 401, address=f"a{number}"))
    await ledger.finish()
    found = await listed(ledger, 2 * MOST_ADDRESSES)
    assert len(found) == MOST_ADDRESSES + MOST_REFUSALS + 1
    assert [(one.address, one.count) for one in found if one.count > 1] == [("", 5)]


async def test_records_wait_for_a_store_that_is_away_and_lost_ones_are_counted(
    ledger: AuditLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "MOST_WAITING", BATCH + 100)

    async def away(_store: Store, _work: object) -> None:
        raise Unavailable("cannot use the database now", code="store_unavailable")

    with monkeypatch.context() as broken:
        broken.setattr(Store, "transaction", away)
        for number in range(BATCH + 130):
            ledger.note(record(f"/api/{number}"))
            if number == BATCH:
                with pytest.raises(Unavailable):
                    await ledger.step()
        await ledger.finish()  # tells it in the log, and does not fail
    await ledger.step()
    found = await listed(ledger, 2 * BATCH)
    (lost,) = [one for one in found if not one.path]
    assert (lost.count, lost.summary.startswith("Records that were lost")) == (30, True)
    assert len(found) == BATCH + 100 + 1


async def test_a_batch_whose_answer_was_lost_is_written_once(
    ledger: AuditLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.note(record())
    really = Store.transaction

    async def unheard(store: Store, work: object) -> None:
        await really(store, work)  # type: ignore[arg-type]
        raise Unavailable("cannot tell whether it was stored", code="store_unavailable")

    with monkeypatch.context() as broken:
        broken.setattr(Store, "transaction", unheard)
        with pytest.raises(Unavailable):
            await ledger.step()
    await ledger.step()
    assert len(await listed(ledger)) == 1


async def test_old_records_are_pruned(ledger: AuditLedger, store: Store, moment: Moment) -> None:
    now = await store.read(db.now)
    for ago in (KEPT + 60, KEPT - 60):
        moment.now = now - ago
        ledger.note(record(f"/api/{ago}"))
    await ledger.step()
    await ledger.prune_step()
    assert [one.path for one in await listed(ledger)] == [f"/api/{KEPT - 60}"]


async def test_rows_are_read_as_they_were_written(store: Store) -> None:
    row = AuditRecord(id="i", at=1.5, who="w", role="admin", token_id="t", session_id="s", address="a", method="PUT")

    def work(connection: Connection) -> list[AuditRecord]:
        audit.add(connection, [row])
        audit.add(connection, [])
        return audit.page(connection, AuditQuery(limit=5))

    assert await store.transaction(work) == [row]
