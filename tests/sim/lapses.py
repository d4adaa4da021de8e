"""More deliberate faults: of what a frontend believes of its workers, how many may work at once, which clock is asked,
and what a worker says of its disk and its processes.

Each is the removal of one rule, or its neglect. Where a rule is for a rare history, a script makes that history likely.
"""

from __future__ import annotations

import time
from random import Random

import msgspec
from sqlalchemy import literal, select
from tests.sim.mutation import Mutant, Patch
from tests.sim.options import BACKENDS, LEASE_SECONDS, METAS, Fault, RequestKind, SimRequest
from tests.sim.parts import SimModels

from enginehouse.core import action, report
from enginehouse.core.action import Action, RemoveBackend
from enginehouse.core.errors import EnginehouseError
from enginehouse.core.ids import IntentId
from enginehouse.core.intent import Change, Intent, Outcome
from enginehouse.core.model import HeldModel
from enginehouse.core.report import Report
from enginehouse.frontend.delivery import reports
from enginehouse.frontend.delivery.collector import Collector
from enginehouse.frontend.delivery.reports import WorkerReports
from enginehouse.frontend.operations import cancel as ending
from enginehouse.frontend.operations import request as operations
from enginehouse.frontend.operations.targets import Targets
from enginehouse.store import claims, lingering, nodes, supersession
from enginehouse.store import intents as store_intents
from enginehouse.store.db import Connection
from enginehouse.worker.agent import Agent
from enginehouse.worker.commands import executor as actions
from enginehouse.worker.commands.actions import Actions, UnderWay
from enginehouse.worker.commands.executor import Executor
from enginehouse.worker.commands.work import outcome_of
from enginehouse.worker.engines.process_table import Stopped

ALPHA, BETA = "one@alpha", "two@alpha"


def request(number: int, at: float, kind: RequestKind, name: str, max_parallel: int = 0) -> SimRequest:
    return SimRequest(number=number, at=at, kind=kind, name=name, frontend=number, max_parallel=max_parallel)


# What is believed ----------------------------------------------------------------------------------


def _old_reports_count() -> list[Patch]:
    real = WorkerReports._evidence

    def _evidence(
        self: WorkerReports, report: Report, intent: Intent, now: float, *, is_shadowed: bool
    ) -> Change | None:
        younger = msgspec.structs.replace(report, mark=max(report.mark, intent.created_at))
        return real(self, younger, intent, now, is_shadowed=is_shadowed)

    return [(WorkerReports, "_evidence", _evidence)]


def _back_and_forth(chance: Random) -> tuple[SimRequest, ...]:
    """Deleted and installed again, while the report from before is still on its way."""
    requests: list[SimRequest] = []
    for name in BACKENDS:
        at = 1.0
        # The first is done and reported before the delete; the last is asked for while that report may be on its way.
        steps: tuple[tuple[RequestKind, float, float], ...] = (
            ("install", 1.3, 2.4),
            ("delete", 0.1, 0.5),
            ("install", 0.0, 0.0),
        )
        for kind, least, most in steps:
            requests.append(request(len(requests), at, kind, name if kind == "delete" else f"one@{name}"))
            at += chance.uniform(least, most)
    return tuple(sorted(requests, key=lambda one: one.at))


def _older_commands_never_arrive() -> list[Patch]:
    return [(store_intents, "unanswered_generations", lambda connection, node_id, subjects: {})]


def delete_at_once(chance: Random) -> tuple[SimRequest, ...]:
    """An install whose message is long under way, and a delete that replaces it."""
    requests: list[SimRequest] = []
    for name in BACKENDS:
        at = chance.uniform(1.0, 2.0)
        requests.append(request(len(requests), at, "install", f"one@{name}"))
        requests.append(request(len(requests), at + chance.uniform(0.1, 3.0), "delete", name))
    return tuple(sorted(requests, key=lambda one: one.at))


def _targets_by_reports_alone() -> list[Patch]:
    return [(Targets, "_changing", lambda self, connection, request, targets: [])]


def _anew_after_a_delete(chance: Random) -> tuple[SimRequest, ...]:
    """An image whose tag has moved is deleted, and installed again before a report has told of that."""
    at = 5.0 + chance.uniform(0.0, 2.0)
    again = at + chance.choice((0.05, 0.3, 1.0)) * chance.uniform(0.2, 1.0)
    return (
        request(0, 1.0, "install", f"one@{BACKENDS[-1]}"),
        request(1, at, "delete", BACKENDS[-1]),
        request(2, again, "install", f"one@{BACKENDS[-1]}"),
    )


def _another_name_is_another_request() -> list[Patch]:
    def is_same_request(wanted: Action, open_one: Action) -> bool:
        return action.is_same_request(wanted, open_one) and action.pointer_of(wanted) == action.pointer_of(open_one)

    return [(supersession, "is_same_request", is_same_request)]


def _joined_names_are_forgotten() -> list[Patch]:
    return [(supersession, "add_pointers", lambda connection, done, new_id, now: [])]


def _under_several_names(chance: Random) -> tuple[SimRequest, ...]:
    """The same build asked for by its own name and by the others, while it is being installed."""
    names = [*METAS, BACKENDS[0]]
    chance.shuffle(names)
    times = sorted(chance.uniform(1.0, 2.0) for _ in names)
    return tuple(
        request(number, at, "install", f"one@{name}")
        for number, (at, name) in enumerate(zip(times, names, strict=True))
    )


def _what_a_report_shows_is_done() -> list[Patch]:
    """Though the worker said that it failed, and that what is in place may not last."""
    return [(report, "may_settle", lambda said, intent: True), (report, "_lasts", lambda backend: True)]


def _installs_and_upgrades(chance: Random) -> tuple[SimRequest, ...]:
    return (
        *(request(number, chance.uniform(1.0, 2.0), "install", f"one@{name}") for number, name in enumerate(BACKENDS)),
        *(request(3 + number, 4.0 + chance.random(), "upgrade", f"two@{name}") for number, name in enumerate(BACKENDS)),
    )


def _late_registrations_are_taken() -> list[Patch]:
    return [(nodes, "take_registration", lambda connection, node_id, at: True)]


# How many ------------------------------------------------------------------------------------------


def _lanes_are_not_counted() -> list[Patch]:
    return [(claims, "_RUNNING_IN_LANE", select(literal(0)))]


def _upgrades_have_no_width() -> list[Patch]:
    return [(module, "width_of", lambda *_: 0) for module in (operations, ending)]


def _upgrade_of_all(chance: Random) -> tuple[SimRequest, ...]:
    return (request(0, 1.5, "install", ALPHA), request(1, chance.uniform(4.5, 6.0), "upgrade", BETA))


def _one_after_another(chance: Random) -> tuple[SimRequest, ...]:
    return (request(0, chance.uniform(1.0, 2.0), "install", ALPHA, max_parallel=1),)


# Who is heard --------------------------------------------------------------------------------------


def _silent_without_the_bus() -> list[Patch]:
    real = Agent._is_time

    def _is_time(self: Agent) -> bool:
        return real(self) and self._hears()

    return [(Agent, "_is_time", _is_time)]


# Which clock ---------------------------------------------------------------------------------------


def _lease_by_the_wall_clock() -> list[Patch]:
    real = claims.take_over

    def take_over(connection: Connection, owner: str, now: float, lease_until: float) -> list[Intent]:
        return real(connection, owner, time.time(), lease_until)

    return [(claims, "take_over", take_over)]


# What a worker says --------------------------------------------------------------------------------


def _disk_error_is_success() -> list[Patch]:
    def outcome(error: EnginehouseError) -> Outcome:
        return Outcome() if error.code == "resource_exhausted" else outcome_of(error)

    return [(actions, "outcome_of", outcome)]


def _what_was_given_up_is_forgotten() -> list[Patch]:
    real = Executor._record

    async def _record(self: Executor, intent: IntentId, current: UnderWay, outcome: Outcome) -> None:
        if not current.ended_by:
            await real(self, intent, current, outcome)

    return [(Executor, "_record", _record)]


def _install_and_cancel(chance: Random) -> tuple[SimRequest, ...]:
    """Each cancelled while it is at work, and a second copy of its message may still come."""
    requests: list[SimRequest] = []
    for name in BACKENDS:
        at = chance.uniform(1.0, 2.0)
        made = request(len(requests), at, "install", f"one@{name}")
        ended = request(len(requests) + 1, at + chance.uniform(0.1, 2.0), "cancel", name)
        requests += [made, msgspec.structs.replace(ended, about=made.number)]
    return tuple(sorted(requests, key=lambda one: one.at))


def _old_workers_get_no_install() -> list[Patch]:
    return [(Collector, "on_old_worker", lambda self, send_forced: None)]


def _unreadable_is_absent() -> list[Patch]:
    real = SimModels.held_models

    def held_models(self: SimModels) -> tuple[HeldModel, ...]:
        try:
            return real(self)
        except OSError:
            return ()

    return [(SimModels, "held_models", held_models)]


def _files_are_removed_first() -> list[Patch]:
    async def _remove(self: Actions, action: RemoveBackend, current: UnderWay) -> Outcome:
        current.can_return = False
        await self._parts.installer.remove(action.directory)
        self._check_ended(await self._parts.supervisor.stop_from(action.directory), "delete", current)
        return Outcome(stopped=current.stopped)

    return [(Actions, "_remove", _remove)]


def _stopped_engines_are_not_told() -> list[Patch]:
    def _check_ended(self: Actions, stopped: Stopped, wanted: str, current: UnderWay) -> None:
        """Says nothing."""

    return [(Actions, "_check_ended", _check_ended)]


def _dead_replicas_are_kept() -> list[Patch]:
    return [(reports, "forget_gone_replicas", lambda connection, node_id, report: False)]


def _nothing_goes_on() -> list[Patch]:
    """What is newer is sent, and settled by a listing, while an old worker goes on with what is older."""
    return [(lingering, "every", lambda connection: [])]


def _install_and_delete(chance: Random) -> tuple[SimRequest, ...]:
    return (request(0, 2.0, "install", "one@beta"), request(1, chance.uniform(3.0, 5.0), "delete", "beta"))


def _load_and_delete(chance: Random) -> tuple[SimRequest, ...]:
    return (request(0, 0.5, "load", "small"), request(1, chance.uniform(5.0, 8.0), "delete", "alpha"))


def _load_and_delete_model(chance: Random) -> tuple[SimRequest, ...]:
    """The word to delete comes while the worker is cut off, so that reports speak before it is heard."""
    return (request(0, 2.5, "load", "small"), request(1, 6.0, "delete_model", "small"))


def _load(chance: Random) -> tuple[SimRequest, ...]:
    return (request(0, 0.5, "load", "small"),)


QUICK: dict[str, float] = {
    **{"old_nodes": 0, "install_seconds": 0.5, "failing_rate": 0.0, "hopeless_rate": 0.0, "stalling_rate": 0.0}
}
LATE: dict[str, float] = {
    **QUICK,
    **{"nodes": 1, "late_rate": 0.5, "late_seconds": 12.0, "drop_rate": 0.3, "reorder_rate": 0.5},
    **{"install_seconds": 10.0, "safety_seconds": 12.0, "lease_seconds": LEASE_SECONDS, "read_error_rate": 0.0},
}
FLEET: dict[str, float] = {**QUICK, "nodes": 3}
LAPSES = (
    Mutant(
        "a report from before the request counts",
        ("G10",),
        _old_reports_count,
        {
            **QUICK,
            **{"nodes": 5, "install_seconds": 1.0, "safety_seconds": 8.0},
            **{"late_rate": 0.0, "late_link_rate": 0.5, "drop_rate": 0.0},
        },
        _back_and_forth,
        (),
    ),
    Mutant(
        "a report settles what its worker never saw", ("G2",), _older_commands_never_arrive, LATE, delete_at_once, ()
    ),
    Mutant(
        "what was given up is forgotten",
        ("G4",),
        _what_was_given_up_is_forgotten,
        {**LATE, "duplicate_rate": 0.5, "drop_rate": 0.0},
        _install_and_cancel,
        (),
    ),
    Mutant(
        "an install after a delete believes the report",
        ("G2",),
        _targets_by_reports_alone,
        {
            **QUICK,
            "nodes": 2,
            "tag_moves_at": 4.0,
            "safety_seconds": 9.0,
            "disk_error_rate": 0.0,
            "full_disk_rate": 0.0,
        },
        _anew_after_a_delete,
        (),
    ),
    Mutant(
        "another name is another request",
        ("G4",),
        _another_name_is_another_request,
        {**QUICK, "install_seconds": 2.0},
        _under_several_names,
    ),
    Mutant(
        "a name that joined gets no pointer",
        ("G10",),
        _joined_names_are_forgotten,
        {**QUICK, "install_seconds": 2.0, "nodes": 2},
        _under_several_names,
        (),
    ),
    Mutant(
        "what a report shows is done though it failed",
        ("G10",),
        _what_a_report_shows_is_done,
        {**QUICK, "nodes": 3, "disk_error_rate": 0.3, "safety_seconds": 8.0, "full_disk_rate": 0.0},
        _installs_and_upgrades,
        (),
    ),
    Mutant(
        "a registration that comes late is taken",
        ("S2",),
        _late_registrations_are_taken,
        {**QUICK, "nodes": 3, "frontends": 2, "safety_seconds": 9.0},
        _one_after_another,
        # Not for so long that nobody waits for it, and longer than a worker does.
        (Fault(at=0.05, seconds=6.0, kind="pause_frontend", target=0),),
    ),
    Mutant("a lane is wider than asked", ("lanes",), _lanes_are_not_counted, FLEET, _one_after_another),
    Mutant("an upgrade takes the whole fleet", ("lanes",), _upgrades_have_no_width, FLEET, _upgrade_of_all),
    Mutant(
        "a worker without its bus is silent",
        ("G19",),
        _silent_without_the_bus,
        {**QUICK, "nodes": 1, "safety_seconds": 25.0},
        _load,
        (Fault(at=4.0, seconds=20.0, kind="cut_bus_of_worker", target=0),),
    ),
    Mutant("a lease is judged by a wall clock", ("G25",), _lease_by_the_wall_clock),
    Mutant("an I/O error is taken for success", ("G10",), _disk_error_is_success, {"disk_error_rate": 0.3}),
    Mutant(
        "an old worker gets no forced install",
        ("end",),
        _old_workers_get_no_install,
        {**QUICK, "nodes": 1, "old_nodes": 1, "drop_rate": 0.0, "safety_seconds": 7.0},
        _upgrade_of_all,
        (),
    ),
    Mutant(
        "an old worker that goes on is not waited for",
        ("G10",),
        _nothing_goes_on,
        {**QUICK, "nodes": 1, "old_nodes": 1, "drop_rate": 0.0, "late_rate": 0.0, "install_seconds": 6.0},
        _install_and_delete,
        (),
    ),
    Mutant(
        "files that cannot be read are called absent",
        ("G10",),
        _unreadable_is_absent,
        {
            **QUICK,
            **{"nodes": 1, "safety_seconds": 13.0, "drop_rate": 0.0, "late_rate": 0.0},
            **{"full_disk_rate": 0.0, "disk_error_rate": 0.0, "read_error_rate": 0.15},
        },
        _load_and_delete_model,
        # Not for so long that the worker notices, and sends no reports.
        (Fault(at=5.95, seconds=1.9, kind="cut_bus_of_worker", target=0),),
    ),
    Mutant("files are removed under an engine", ("G6",), _files_are_removed_first, QUICK, _load_and_delete, ()),
    Mutant("engines are stopped in silence", ("G13",), _stopped_engines_are_not_told, QUICK, _load_and_delete, ()),
    Mutant(
        "a dead replica stays a route",
        ("G13",),
        _dead_replicas_are_kept,
        QUICK,
        _load,
        (Fault(at=3.0, seconds=0.1, kind="crash_engine", target=0),),
    ),
)
