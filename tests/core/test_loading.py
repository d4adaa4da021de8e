"""What a load does next, where a replica goes, and what a report proves."""

from __future__ import annotations

import msgspec

from enginehouse.core import report
from enginehouse.core.action import (
    Action,
    InstallBackend,
    PullModel,
    RemoveBackend,
    StartReplica,
    StopReplica,
    subject_of,
)
from enginehouse.core.backend import InstalledBackend, Resolved
from enginehouse.core.capacity import Capacity
from enginehouse.core.demand import demand_of
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.intent import CANARY, Intent, Outcome, State
from enginehouse.core.loading import Done, GiveUp, LoadState, MakeRoom, Next, Wait, next_step
from enginehouse.core.model import HeldModel, Model, ModelFile
from enginehouse.core.node import Node, health_after
from enginehouse.core.operation import ReplacedReplica
from enginehouse.core.placement import IdleReplica, Needs, Reservation, Room
from enginehouse.core.replica import RunningReplica
from enginehouse.core.report import CommandResult, Report

A = NodeId("a")
B = NodeId("b")

MODEL = Model(name="m", backend="llama-cpp", files=(ModelFile("m.gguf", "builtin:m.gguf", "ab"),))
BUILD = Resolved(directory="xllamacpp", uri="pypi:x==1", digest="sha256:1", meta="llama-cpp")
INSTALLED = InstalledBackend(name="xllamacpp", is_system=False, is_meta=False, digest="sha256:1", generation=1)
POINTER = InstalledBackend(name="llama-cpp", is_system=False, is_meta=True, meta_backend_for="xllamacpp")


def node(name: str, **fields: object) -> Node:
    plain: dict[str, object] = {
        "id": name,
        "name": name,
        "node_type": "backend",
        "public_key": "k",
        "approved": True,
        "health": "healthy",
        "drained": False,
        "address": "",
        "http_address": "",
        "capability": "default",
        "platform": "linux/amd64",
        "labels": {},
        "max_replicas_per_model": 1,
        "capacity": Capacity(),
        "created_at": 0.0,
        "updated_at": 0.0,
        "last_heartbeat": 0.0,
        "report": Report(),
    }
    return Node(**(plain | fields))  # type: ignore[arg-type]


def intent(action: Action, state: State, at: str = "a") -> Intent:
    return Intent(
        id=IntentId("i"),
        node_id=NodeId(at),
        subject="s",
        generation=3,
        action=action,
        state=state,
        created_at=10.0,
        updated_at=10.0,
        due_at=10.0,
        attempt=1,
        dispatched_at=12.0,
        reason="backend_exited" if state == "failed" else "",
        message={"failed": "it ended", "superseded": "a newer request replaced it"}.get(state, ""),
    )


INSTALL = InstallBackend(backend="llama-cpp", resolved=BUILD)
PULL = PullModel(model=MODEL)
START = StartReplica(model=MODEL, slot=0, directory="xllamacpp", key="k")


def step(intents: list[Intent], nodes: list[Node], only: str = "", changes: tuple[Intent, ...] = ()) -> object:
    needs = Needs(model=MODEL, demand=demand_of(MODEL), builds={one.id: BUILD for one in nodes}, only=only)
    state = LoadState(intents=intents, changes=changes)
    return next_step(needs, [Room(node=one) for one in nodes], state, new_key="k")


def change(action: InstallBackend | PullModel | RemoveBackend, state: State, at: str = "a", **fields: object) -> Intent:
    """What somebody else did or does about the same engine or the same files."""
    made = msgspec.structs.replace(intent(action, state, at), id="other", subject=subject_of(action))
    return msgspec.structs.replace(made, **fields)


def test_a_load_installs_and_places_side_by_side_and_then_starts() -> None:
    nodes = [node("a")]
    assert step([], nodes) == Next(A, INSTALL)
    assert step([intent(INSTALL, "running")], nodes) == Next(A, PULL)
    assert step([intent(INSTALL, "running"), intent(PULL, "running")], nodes) == Wait()
    assert step([intent(INSTALL, "running"), intent(PULL, "succeeded")], nodes) == Wait()
    assert step([intent(INSTALL, "succeeded"), intent(PULL, "running")], nodes) == Wait()
    assert step([intent(INSTALL, "succeeded")], nodes) == Next(A, PULL)
    assert step([intent(INSTALL, "succeeded"), intent(PULL, "succeeded")], nodes) == Next(A, START)
    assert step([intent(START, "running")], nodes) == Wait()
    assert step([intent(START, "succeeded")], nodes) == Done()


def test_files_that_are_there_are_not_placed_while_the_engine_is_installed() -> None:
    nodes = [node("a", report=Report(models=(HeldModel("m", ("ab",)),)))]
    assert step([intent(INSTALL, "running")], nodes) == Wait()


def test_a_node_where_one_of_two_steps_failed_is_left_whatever_the_other_did() -> None:
    tried = [intent(INSTALL, "failed", "a"), intent(PULL, "succeeded", "a")]
    assert step(tried, [node("a"), node("b")]) == Next(B, INSTALL)
    assert step(tried, [node("a")]) == GiveUp("backend_exited", "it ended")
    assert step([intent(INSTALL, "failed", "a"), intent(PULL, "running", "a")], [node("a"), node("b")]) == Wait()


def test_a_load_skips_what_the_node_reports_to_have() -> None:
    held = Report(backends=(INSTALLED, POINTER), models=(HeldModel("m", ("ab",)),))
    assert step([], [node("a", report=held)]) == Next(A, START)


def test_a_load_that_fails_on_one_node_goes_to_another_and_then_gives_up_with_the_first_cause() -> None:
    nodes = [node("a"), node("b")]
    assert step([intent(START, "failed", "a")], nodes) == Next(B, INSTALL)
    assert step([intent(START, "failed", "a")], nodes, only="a") == GiveUp("backend_exited", "it ended")
    both = [intent(START, "failed", "a"), intent(INSTALL, "failed", "b")]
    assert step(both, nodes) == GiveUp("backend_exited", "it ended")


def test_a_load_whose_step_was_superseded_leaves_that_node_to_whoever_asked_for_something_else() -> None:
    assert step([intent(INSTALL, "superseded", "a")], [node("a"), node("b")]) == Next(B, INSTALL)
    alone = step([intent(INSTALL, "superseded", "a")], [node("a")])
    assert isinstance(alone, GiveUp)
    assert alone.code == "superseded"
    assert "a newer request" in alone.message


WARM = Report(mark=9.0, backends=(INSTALLED, POINTER), models=(HeldModel("m", ("ab",)),))
REMOVE = RemoveBackend(backend="llama-cpp", directory="xllamacpp")


def test_what_was_deleted_since_the_report_is_installed_again() -> None:
    gone = change(REMOVE, "succeeded", generation=4)
    assert step([], [node("a", report=WARM)], changes=(gone,)) == Next(A, INSTALL)
    # The report is known to be younger than that: it was installed again by somebody else.
    later = msgspec.structs.replace(WARM, mark=10.5)
    assert step([], [node("a", report=later)], changes=(gone,)) == Next(A, START)
    # Also after the load itself had installed it.
    own = [msgspec.structs.replace(intent(INSTALL, "succeeded"), subject="backend:xllamacpp", generation=3)]
    assert step(own, [node("a", report=WARM)], changes=(gone,)) == Next(A, INSTALL)
    earlier = change(REMOVE, "succeeded", generation=2)
    assert step(own, [node("a", report=WARM)], changes=(earlier,)) == Next(A, START)


def test_a_warm_node_whose_engine_was_deleted_is_no_longer_preferred() -> None:
    nodes = [node("a", report=WARM), node("b", report=WARM)]
    assert step([], nodes, changes=(change(REMOVE, "succeeded"),)) == Next(B, START)


def test_a_load_waits_for_a_delete_of_its_engine_or_goes_elsewhere() -> None:
    going = change(REMOVE, "running")
    assert step([], [node("a", report=WARM)], changes=(going,)) == Wait()
    assert step([], [node("a", report=WARM), node("b")], changes=(going,)) == Next(B, INSTALL)
    assert step([], [node("a", report=WARM), node("b")], only="a", changes=(going,)) == Wait()
    placed = [intent(PULL, "succeeded")]
    assert step(placed, [node("a", report=WARM)], changes=(going,)) == Wait()
    assert isinstance(step([], [node("a", report=WARM, drained=True)], changes=(going,)), GiveUp)


def test_a_load_does_not_wait_for_an_upgrade_that_waits_for_canaries() -> None:
    held = change(INSTALL, "waiting", reason=CANARY)
    placed = [intent(PULL, "succeeded")]
    assert step([], [node("a", report=WARM)], changes=(held,)) == Next(NodeId("a"), START)
    assert step(placed, [node("a", report=WARM)], changes=(held,)) == Next(NodeId("a"), START)
    due = msgspec.structs.replace(held, reason="")
    assert step(placed, [node("a", report=WARM)], changes=(due,)) == Wait()


def test_not_installed_here_means_install_it_there_and_said_again_it_is_a_failure() -> None:
    absent = msgspec.structs.replace(intent(START, "failed"), reason="not_found")
    assert step([absent], [node("a", report=WARM), node("b")]) == Next(A, INSTALL)
    again = [absent, intent(INSTALL, "succeeded")]
    assert step(again, [node("a", report=WARM)]) == Next(A, START)
    assert step([*again, absent], [node("a", report=WARM), node("b")]) == Next(B, INSTALL)
    assert step([*again, absent], [node("a", report=WARM)]) == GiveUp("not_found", "it ended")


def test_what_does_not_stay_is_not_installed_for_ever() -> None:
    broken = Report(mark=99.0, backends=(msgspec.structs.replace(INSTALLED, is_broken=True),))
    assert step([intent(INSTALL, "succeeded")] * 3, [node("a", report=broken)]) == Next(A, INSTALL)
    assert isinstance(step([intent(INSTALL, "succeeded")] * 4, [node("a", report=broken)]), GiveUp)


def test_a_load_waits_for_another_version_of_its_engine_that_replaced_its_own_install() -> None:
    ended = [intent(INSTALL, "superseded")]
    upgrade = change(msgspec.structs.replace(INSTALL, upgrade=True), "running", generation=4)
    assert step(ended, [node("a"), node("b")], changes=(upgrade,)) == Wait()
    delete = change(REMOVE, "running", generation=4)
    assert step(ended, [node("a"), node("b")], changes=(delete,)) == Next(B, INSTALL)


def test_a_load_whose_node_was_removed_goes_to_another() -> None:
    removed = msgspec.structs.replace(intent(INSTALL, "cancelled", "a"), reason="node_removed")
    assert step([removed], [node("b")]) == Next(B, INSTALL)


def test_a_load_leaves_a_node_that_was_drained_or_is_offline_whatever_was_sent_there() -> None:
    for out in ({"drained": True}, {"health": "offline"}):
        nodes = [node("a", **out), node("b")]
        waiting = intent(INSTALL, "waiting", "a")
        assert step([waiting], nodes) == Next(B, INSTALL)
        assert step([intent(INSTALL, "succeeded", "a")], nodes) == Next(B, INSTALL)
        left = msgspec.structs.replace(waiting, state="cancelled", reason="node_left")
        assert step([left, intent(INSTALL, "succeeded", "b")], nodes) != Wait()
        assert step([intent(START, "running", "a")], nodes) == Next(B, INSTALL)
        alone = step([waiting], nodes[:1])
        assert isinstance(alone, GiveUp)
        assert alone.code == "insufficient_capacity"


def test_a_load_that_left_every_node_tells_why_they_do_not_take_it() -> None:
    """Not that its last step was cancelled: whoever waits may try again."""
    left = [msgspec.structs.replace(intent(INSTALL, "cancelled", name), reason="node_left") for name in ("a", "b")]
    ended = step(left, [node("a", health="offline"), node("b", health="offline")])
    assert isinstance(ended, GiveUp)
    assert (ended.code, ended.message) == ("insufficient_capacity", "cannot place m: a is offline; b is offline")
    failed = msgspec.structs.replace(intent(INSTALL, "failed", "a"), reason="digest_mismatch")
    ended = step([failed, left[1]], [node("a"), node("b", health="offline")])
    assert isinstance(ended, GiveUp)
    assert ended.code == "digest_mismatch"


def test_a_load_whose_step_was_cancelled_ends() -> None:
    ended = step([intent(INSTALL, "cancelled", "a")], [node("a"), node("b")])
    assert isinstance(ended, GiveUp)
    assert ended.code == "cancelled"


def test_a_load_goes_on_in_the_slot_that_it_has_reserved() -> None:
    reserved = Reservation(operation_id="o", node_id=A, model="m", slot=2, memory_bytes=5)
    needs = Needs(model=MODEL, demand=demand_of(MODEL), builds={A: BUILD})
    state = LoadState(intents=[intent(INSTALL, "succeeded"), intent(PULL, "succeeded")], reserved=reserved)
    room = Room(node=node("a", report=WARM, max_replicas_per_model=3), slots=(0, 1))
    start = msgspec.structs.replace(START, slot=2)
    assert next_step(needs, [room], state, new_key="k") == Next(A, start, 2)


def test_idle_replicas_are_stopped_first_and_the_next_report_shows_the_room() -> None:
    large = msgspec.structs.replace(MODEL, files=(ModelFile("f", "builtin:f", "ab", 4 * 1024**3),))
    needs = Needs(model=large, demand=demand_of(large), builds={A: BUILD})
    full = node("a", report=WARM, capacity=Capacity(available_ram=2 * 1024**3), last_heartbeat=5.0)
    idle = (IdleReplica(model="other", slot=1, memory_bytes=8 * 1024**3, used_at=1.0),)
    stop = StopReplica(model="other", slot=1)
    first = next_step(needs, [Room(node=full, idle=idle)], LoadState(intents=[]), new_key="k")
    assert first == MakeRoom(A, (stop,))
    stopped = LoadState(intents=[intent(stop, "succeeded")])
    assert next_step(needs, [Room(node=full)], stopped, new_key="k") == Wait()
    empty = msgspec.structs.replace(full, capacity=Capacity(available_ram=10 * 1024**3), last_heartbeat=11.0)
    assert next_step(needs, [Room(node=empty)], stopped, new_key="k") == Next(
        A, msgspec.structs.replace(START, model=large)
    )


def test_a_load_waits_for_a_node_that_is_away_for_a_moment_and_gives_up_on_one_that_is_gone() -> None:
    assert step([], [node("a", health="unhealthy"), node("b", health="offline")]) == Wait()
    assert isinstance(step([], [node("a", health="offline")]), GiveUp)
    assert isinstance(step([], [node("a", health="unhealthy"), node("b", health="offline")], only="b"), GiveUp)
    assert isinstance(step([], [node("a", health="unhealthy", approved=False)]), GiveUp)
    failed = [intent(START, "failed", "a")]
    assert isinstance(step(failed, [node("a", health="unhealthy")]), GiveUp)


def test_a_report_settles_an_install_by_digest_and_a_forced_one_by_generation() -> None:
    seen = Report(boot_id="b", mark=20.0, backends=(INSTALLED, POINTER))
    assert report.shows(seen, intent(INSTALL, "running")) is not None
    other = msgspec.structs.replace(BUILD, digest="sha256:2")
    assert report.shows(seen, intent(InstallBackend(backend="x", resolved=other), "running")) is None
    forced = intent(InstallBackend(backend="x", resolved=BUILD, force=True), "running")
    assert report.shows(seen, forced) is None
    applied = msgspec.structs.replace(INSTALLED, generation=3)
    assert report.shows(Report(boot_id="b", backends=(applied, POINTER)), forced) is not None
    broken = msgspec.structs.replace(INSTALLED, is_broken=True)
    assert report.shows(Report(boot_id="b", backends=(broken, POINTER)), intent(INSTALL, "running")) is None


def test_a_tree_that_is_not_known_to_be_on_disk_proves_nothing() -> None:
    unsettled = msgspec.structs.replace(INSTALLED, is_unsettled=True, generation=3)
    for asked in (INSTALL, msgspec.structs.replace(INSTALL, keep=True), msgspec.structs.replace(INSTALL, force=True)):
        assert report.shows(Report(boot_id="b", backends=(unsettled, POINTER)), intent(asked, "running")) is None


def test_a_report_settles_an_install_of_a_meta_name_only_where_that_name_leads_to_it() -> None:
    asked = intent(INSTALL, "running")
    elsewhere = msgspec.structs.replace(POINTER, meta_backend_for="another")
    for pointers in ((), (elsewhere,)):
        assert report.shows(Report(boot_id="b", backends=(INSTALLED, *pointers)), asked) is None
    # A listing of LocalAI's workers says that the name is there; one that is an alias it hides.
    listed = msgspec.structs.replace(POINTER, meta_backend_for="")
    assert report.shows(Report(backends=(INSTALLED,)), asked) is None
    assert report.shows(Report(backends=(INSTALLED, listed)), asked) is not None
    alias = msgspec.structs.replace(BUILD, alias="llama-cpp")
    hidden = intent(msgspec.structs.replace(INSTALL, resolved=alias), "running")
    assert report.shows(Report(backends=(INSTALLED,)), hidden) is not None


def test_a_report_settles_a_delete_only_by_absence() -> None:
    remove = intent(RemoveBackend(backend="llama-cpp", directory="xllamacpp"), "running")
    assert report.shows(Report(boot_id="b", backends=(INSTALLED,)), remove) is None
    assert report.shows(Report(boot_id="b"), remove) is not None


def test_a_report_settles_a_start_only_by_the_process_of_this_generation() -> None:
    old = RunningReplica(model_id="m", replica_index=0, address="h:1", nonce="n", generation=2)
    new = msgspec.structs.replace(old, generation=3)
    assert report.shows(Report(boot_id="b", replicas=(old,)), intent(START, "running")) is None
    shown = report.shows(Report(boot_id="b", replicas=(new,)), intent(START, "running"))
    assert shown is not None
    assert (shown.address, shown.nonce) == ("h:1", "n")


def test_a_command_counts_as_lost_only_when_the_worker_certainly_does_not_have_it() -> None:
    running = intent(INSTALL, "running")  # sent at 12
    assert not report.lost(Report(boot_id="b", mark=13.0, boot_mark=5.0), running), "it may still be under way"
    assert report.lost(Report(boot_id="b", mark=14.5, boot_mark=5.0), running)
    assert report.lost(Report(boot_id="b", mark=0.0, boot_mark=12.5), running), "this run began after the sending"
    assert not report.lost(Report(boot_id="b", mark=99.0, boot_mark=99.0, running=(IntentId("i"),)), running)


def test_a_result_counts_only_for_its_own_attempt() -> None:
    running = intent(INSTALL, "running")
    result = CommandResult(intent=IntentId("i"), attempt=1, outcome=Outcome(code="x", message="m"))
    assert report.result_for(Report(boot_id="b", results=(result,)), running) == result.outcome
    later = msgspec.structs.replace(running, attempt=2)
    assert report.result_for(Report(boot_id="b", results=(result,)), later) is None


def test_health_follows_silence() -> None:
    assert [health_after(age, 30) for age in (0, 29, 30, 59, 60)] == [
        "healthy",
        "healthy",
        "unhealthy",
        "unhealthy",
        "offline",
    ]


def replacing(intents: list[Intent], where: Node, *, slots: tuple[int, ...] = (0,), gib: int = 4) -> object:
    """The next step of a load that replaces the replica in slot 0 of node a."""
    large = msgspec.structs.replace(MODEL, files=(ModelFile("m.gguf", "builtin:m.gguf", "ab", gib * 1024**3),))
    needs = Needs(
        model=large,
        demand=demand_of(large),
        builds={where.id: BUILD},
        may_replace=False,
        replaces=ReplacedReplica(node_id=A, slot=0, nonce="old"),
    )
    return next_step(needs, [Room(node=where, slots=slots)], LoadState(intents=intents), new_key="k")


def ready_node(free_gib: float, **fields: object) -> Node:
    held = Report(backends=(INSTALLED, POINTER), models=(HeldModel("m", ("ab",)),))
    capacity = Capacity(total_ram=64 * 1024**3, available_ram=int(free_gib * 1024**3))
    return node("a", report=held, capacity=capacity, **fields)


def test_a_replacement_starts_beside_the_old_replica_where_memory_allows() -> None:
    started = replacing([], ready_node(30.0))
    assert isinstance(started, Next)
    assert isinstance(started.action, StartReplica)
    assert started.slot == 1, "one slot more than the worker allows, for the time of the replacement"


def test_a_replacement_takes_the_place_of_the_old_replica_where_there_is_no_room_for_two() -> None:
    stop = StopReplica(model="m", slot=0)
    assert replacing([], ready_node(2.0)) == MakeRoom(A, (stop,))
    stopped = msgspec.structs.replace(intent(stop, "succeeded"), updated_at=10.0)
    assert replacing([stopped], ready_node(2.0), slots=()) == Wait(), "the next report shows the memory that is free"
    after = replacing([stopped], ready_node(30.0, last_heartbeat=11.0), slots=())
    assert isinstance(after, Next)
    assert after.slot == 0


def test_a_replacement_stops_nothing_where_the_end_of_the_old_replica_would_not_help() -> None:
    full = msgspec.structs.replace(ready_node(30.0).capacity, available_disk=1)
    without_files = msgspec.structs.replace(ready_node(30.0), capacity=full, report=Report(backends=(INSTALLED,)))
    assert isinstance(replacing([], without_files), GiveUp)
    assert isinstance(replacing([], ready_node(30.0, drained=True)), GiveUp)
    assert isinstance(replacing([], ready_node(2.0), slots=()), GiveUp), "it ended meanwhile"


def test_a_worker_of_localai_has_no_slot_beside_its_only_one() -> None:
    go = ready_node(30.0, public_key="")
    assert go.is_localai
    assert replacing([], go) == MakeRoom(A, (StopReplica(model="m", slot=0),))
