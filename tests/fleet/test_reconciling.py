"""The reconciler on three frontends at once, as fast as it can, paused and killed anywhere: what comes of it is what
comes of one clean pass.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import psycopg
from tests.e2e.conftest import wait_for
from tests.fetch.faults import Stall
from tests.fleet.cluster import NATS, Fleet, Frontend, Process
from tests.fleet.guests import guest_frontends
from tests.fleet.tap import Tap, tapped
from tests.fleet.warehouse import MEGABYTE, Warehouse
from tests.ports import free_port
from tests.worker.shelf import said_by

from enginehouse.core.errors import Unavailable

IS_PROOF = os.environ.get("ENGINEHOUSE_PROOF") == "1"
MIXED = 24 if IS_PROOF else 6  # backends: a third stays, a third is deleted again, a third is cancelled
PAUSES = 20 if IS_PROOF else 3
LEASE_SECONDS = 1.0  # of the three
PAUSE_SECONDS = 2.5 * LEASE_SECONDS  # another one has to take over meanwhile, on a busy machine too
HASTY = ("hasty-1", "hasty-2", "hasty-3")
TAKEN_OVER = "intent.taken_over"


class Pass:
    """What is requested for, and what came of it. `engines` are names that nobody has used."""

    def __init__(self, fleet: Fleet, warehouse: Warehouse, engines: Sequence[str]) -> None:
        self.fleet = fleet
        self.warehouse = warehouse
        self.engines = engines
        self.kept, self.deleted, self.cancelled = engines[0::3], engines[1::3], engines[2::3]
        self.images = {name: warehouse.publish(name, "one", megabytes=0.5) for name in engines}
        for name in self.cancelled:
            # Only the bytes of what is cancelled never end, so that it cannot be done before.
            warehouse.proxy.plan(Stall(1000), path=self.images[name].layers[0].digest, times=None)
        self._operations: dict[str, dict[str, Any]] = {}

    def ask_for_all(self, frontends: Sequence[Frontend]) -> None:
        """At once, each of another frontend; what is cancelled is cancelled by one that did not accept it."""
        with ThreadPoolExecutor(len(self.engines)) as pool:
            asked = list(pool.map(lambda number: self._ask(number, frontends), range(len(self.engines))))
        self._operations = dict(zip(self.engines, asked, strict=True))

    def _ask(self, number: int, frontends: Sequence[Frontend]) -> dict[str, Any]:
        name, kind = self.engines[number], "delete" if self.engines[number] in self.deleted else "install"
        frontend, other = (frontends[(number + more) % len(frontends)] for more in (0, 1))
        ask = partial(self.fleet.request, kind, name, frontend=frontend, key=f"reconciling-{name}")
        made: dict[str, Any] = wait_for(f"{kind} {name} to be accepted", partial(unless_away, ask))
        if name in self.cancelled:
            cancel = partial(other.post, f"/api/operations/{made['jobID']}/cancel", {})
            wait_for(f"{kind} {name} to be cancelled", partial(unless_away, cancel))
        return made

    def until_over(self) -> None:
        for operation in self._operations.values():
            self.fleet.ended(operation, self.fleet.second)
        for worker in self.fleet.workers:
            wait_for("nothing to be left of what was cancelled", partial(is_clean, self.fleet, worker), 10)

    def state(self, frontend: Frontend) -> list[tuple[str, list[tuple[str, str]]]]:
        """How each operation ended, everywhere, as this frontend tells it."""
        found = [frontend.operation(self._operations[name]["jobID"]) for name in self.engines]
        rows = [sorted((row["node_name"], row["status"]) for row in one["nodes"]) for one in found]
        return [(one["status"], each) for one, each in zip(found, rows, strict=True)]

    def effects(self, away: set[str]) -> list[dict[str, object]]:
        """What was done to the disks of the workers, and with how many downloads and beginnings. What is cancelled may
        or may not have begun; and who was thought to be away may have begun once more.
        """
        return [self._effects(name, sorted(set(self.fleet.workers) - away)) for name in self.engines]

    def _effects(self, name: str, always_there: Sequence[str]) -> dict[str, object]:
        trees = {worker: self.fleet.backends_of(worker) / name for worker in self.fleet.workers}
        done: dict[str, object] = {worker: said_by(tree) if tree.exists() else "" for worker, tree in trees.items()}
        if name not in self.cancelled:
            bulk = self.images[name].layers[0]
            done["downloads"] = self.warehouse.proxy.bytes_sent(bulk.digest) / bulk.size_bytes
            for kind in ("install", "delete"):
                done[kind] = {worker: self.fleet.began(worker, f"{kind} {name}") for worker in always_there}
        return done


def unless_away(ask: Callable[[], Any]) -> Any:
    """The answer, or nothing where the frontend was killed over it; then it is asked again, as any client would."""
    try:
        return ask()
    except Unavailable:
        return None


def is_clean(fleet: Fleet, worker: str) -> bool:
    return fleet.residue_of(worker) == []


@contextmanager
def witnessed(fleet: Fleet) -> Iterator[Callable[[], set[str]]]:
    """Which nodes any frontend has thought to be away meanwhile: on a machine with too few cores for all of this, one
    may be, and is then told again. The database notes it, so that none is missed.
    """
    for statement in (
        "create table thought_away (name text)",
        """create function note_away() returns trigger language plpgsql as
            $$ begin insert into thought_away values (new.name); return new; end $$""",
        """create trigger note_away after update of health on nodes for each row when (new.health = 'offline')
            execute function note_away()""",
    ):
        fleet.rows(statement)
    try:
        yield lambda: {name for (name,) in fleet.rows("select name from thought_away")}
    finally:
        fleet.rows("drop trigger note_away on nodes")
        fleet.rows("drop function note_away")
        fleet.rows("drop table thought_away")


@contextmanager
def only_answering(fleet: Fleet) -> Iterator[None]:
    """The fleet's own frontends would claim what is meant for those that are disturbed. Whose bus is gone claims
    nothing, but takes the heartbeats, which the workers send to these two alone.
    """
    port = free_port()
    bus = Process("bus", (NATS, "-a", "127.0.0.1", "-p", str(port)), fleet.root / "bus.log", {})
    bus.start()
    own = (fleet.first, fleet.second)
    try:
        for frontend in own:
            frontend.again(ENGINEHOUSE_NATS_URL=f"nats://127.0.0.1:{port}")
            wait_for(f"{frontend.name} to be ready", frontend.is_ready)
        bus.kill()
        yield
    finally:
        bus.stop()
        for frontend in own:
            frontend.again(ENGINEHOUSE_NATS_URL=fleet.nats_url)
            wait_for(f"{frontend.name} to be ready", frontend.is_ready)


def sender(fleet: Fleet, engines: Sequence[str], frontends: Sequence[Frontend]) -> Frontend | None:
    """One of them that has sent what is under way now."""
    query = "select id from intents where state = 'running' and subject = any(%s)"
    running = [intent for (intent,) in fleet.rows(query, [f"backend:{name}" for name in engines])]
    logs = {frontend: fleet.log_of(frontend.name) for frontend in frontends}
    return next((one for one in frontends if any(f"intent.sent intent={each} " in logs[one] for each in running)), None)


def disturb(first: Frontend, frontends: Sequence[Frontend]) -> None:
    """One after the other sleeps for longer than its lease, and meanwhile another is killed and comes back."""
    never = threading.Event()
    start = frontends.index(first)
    for number in range(PAUSES):
        sleeper, victim = (frontends[(start + number + more) % 3] for more in (0, 1))
        sleeper.pause()
        if number % 4 == 1:
            victim.kill()
            victim.start()
        never.wait(PAUSE_SECONDS)
        sleeper.resume()


def needless(tap: Tap, away: set[str]) -> list[tuple[str, int]]:
    """Attempts that were sent twice, or though the one before had been sent to a node that was there all the time."""
    tap.settle()
    found: list[tuple[str, int]] = []
    sent: set[tuple[str, int]] = set()
    for message in tap.heard:
        command = msgspec.json.decode(message.payload).get("command") if message.payload else None
        if not command:
            continue
        intent, attempt = command["intent"], command["attempt"]
        is_again = (intent, attempt - 1) in sent and message.subject.split(".")[1] not in away
        if is_again or (intent, attempt) in sent:
            found.append((intent, attempt))
        sent.add((intent, attempt))
    return found


def taken_over(frontends: Iterable[Frontend], fleet: Fleet) -> int:
    return sum(fleet.log_of(frontend.name).count(TAKEN_OVER) for frontend in frontends)


def test_three_hasty_frontends_that_sleep_and_die_do_what_one_clean_pass_does(
    fleet: Fleet, warehouse: Warehouse, names: Callable[[int], list[str]]
) -> None:
    """F-046."""
    engines = names(2 * MIXED)
    clean, disturbed = (Pass(fleet, warehouse, some) for some in (engines[:MIXED], engines[MIXED:]))
    options = ("--reconcile", "100ms", "--lease", f"{LEASE_SECONDS}s")
    with witnessed(fleet) as thought_away:
        for made in [fleet.request("install", one) for one in (*clean.deleted, *disturbed.deleted)]:
            assert fleet.ended(made)["status"] == "succeeded"
        clean.ask_for_all([fleet.first])
        clean.until_over()
        expected = clean.state(fleet.first)
        # Long enough to be under way while their owners sleep.
        warehouse.proxy.bytes_per_second = 0.15 * MEGABYTE
        with (
            tapped(fleet, warehouse) as tap,
            guest_frontends(fleet, HASTY, *options) as hasty,
            only_answering(fleet),
            ThreadPoolExecutor() as pool,
        ):
            asking = pool.submit(disturbed.ask_for_all, hasty)

            def first_sender() -> Frontend | None:
                if asking.done():
                    asking.result()  # what went wrong there, instead of waiting in vain
                return sender(fleet, disturbed.kept, hasty)

            owner = wait_for("one of them to send", first_sender)
            disturb(owner, hasty)
            asking.result(60)
            disturbed.until_over()
            for frontend in hasty:
                wait_for(f"{frontend.name} to be ready", frontend.is_ready)
            away = thought_away()
            away_ids = {node["id"] for node in fleet.nodes() if node["name"] in away}
            assert taken_over(hasty, fleet) > 0, "nobody slept past a lease"
            assert needless(tap, away_ids) == []
            for frontend in fleet.frontends:
                assert disturbed.state(frontend) == expected, frontend.name
        assert disturbed.effects(away) == clean.effects(away)
    assert [status for status, _ in expected] == ["succeeded", "succeeded", "cancelled"] * (MIXED // 3)


def test_a_cancel_that_meets_a_change_of_the_same_row_is_carried_out_after_it(
    fleet: Fleet, warehouse: Warehouse, name: str
) -> None:
    """F-046. Between its look and its writing somebody else writes, as a frontend does that claims it."""
    image = warehouse.publish(name, "one")
    warehouse.proxy.plan(Stall(1000), path=image.layers[0].digest, times=None)
    operation = fleet.request("install", name, ["worker-2"])
    wait_for("it to be begun", partial(is_under_way, fleet, name))
    waiting = "select 1 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    with psycopg.connect(fleet.database_url) as connection:
        connection.execute("update intents set version = version + 1 where subject = %s", (f"backend:{name}",))
        cancels = threading.Thread(target=fleet.second.post, args=(f"/api/operations/{operation['jobID']}/cancel", {}))
        cancels.start()
        wait_for("the cancel to wait", lambda: fleet.rows(waiting))
        connection.commit()
        cancels.join(20)
    assert fleet.first.operation(operation["jobID"])["status"] == "cancelled"


def is_under_way(fleet: Fleet, name: str) -> bool:
    return fleet.began("worker-2", f"install {name}") == 1
