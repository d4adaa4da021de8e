"""The guarantees of serving, each a function that looks at facts and says what is wrong with them, or nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from tests.sim.disk import Engine
from tests.sim.rows import IntentRow, OperationRow
from tests.sim.serving.facts import ModelFact, NodeFact

if TYPE_CHECKING:
    from tests.sim.serving.machines import ServingMachine


def one_load_serves_all(load: OperationRow, open_ones: Collection[OperationRow]) -> str:
    """G16: whoever asks for a cold model joins the load that is under way."""
    if not open_ones:
        return ""
    others = ", ".join(f"{one.id} by {one.author}" for one in open_ones)
    return f"load {load.id} of {load.name} by {load.author} began while {others} was under way"


def no_more_than_wanted(fact: ModelFact, number: int, targets: list[str], *, is_busy: bool) -> str:
    """G20: the reconciler begins a load only for what is missing, or one more where all are busy and more may be."""
    most = fact.schedule.most
    if most and number > most:
        return f"a load of {fact.name} makes {number}, at most {most} may be"
    if targets and (targets[0] in fact.kept or fact.schedule.spread):
        return ""
    if number <= fact.most or (is_busy and fact.schedule.is_there and (most or fact.schedule.least)):
        return ""
    return f"a load of {fact.name} makes {number}, {fact.most} are wanted"


def replaces_one_at_a_time(
    load: OperationRow, replaced: Mapping[str, object], fact: ModelFact, open_ones: Collection[OperationRow]
) -> str:
    """G20: replicas are replaced one after the other, and only one that is there."""
    if open_ones:
        return f"load {load.id} replaces {replaced} while others of {load.name} are under way"
    one = next((one for one in fact.replicas if one.nonce == replaced["nonce"]), None)
    return "" if one is not None else f"load {load.id} replaces {replaced}, which is not there"


def starts_where_it_may(intent: IntentRow, node: NodeFact | None) -> str:
    """G20: nothing is started on a node that is drained or was given up."""
    if node is not None and node.is_serving:
        return ""
    return f"intent {intent.id} starts {intent.subject} on {node}"


def stays_above_the_least(fact: ModelFact, node_id: str, *, is_eviction: bool) -> str:
    """G20: neither room nor scale costs a model what it is to have at least."""
    stays = fact.serving
    if fact.schedule.spread:
        # On each node that matches one stays.
        matches = node_id in {node.id for node in fact.nodes if fact.is_selected(node)}
        here = [one for one in stays if one.node_id == node_id]
        return f"the only {fact.name} of a node was stopped, which is to be everywhere" if matches and not here else ""
    node = next((one for one in fact.nodes if one.id == node_id), None)
    if node is not None and not (fact.is_selected(node) and node.is_serving):
        return ""  # it does not belong there, or answers nobody: nothing is lost
    least = fact.least if is_eviction else min(fact.most, fact.schedule.most or fact.most)
    if len(stays) >= least:
        return ""
    return f"a stop leaves {len(stays)} of {fact.name}, at least {least} are wanted"


def fits_the_machine(machine: ServingMachine, engine: Engine) -> str:
    """Never over capacity by our own doing, where the demand was known."""
    if machine.used_bytes <= machine.memory_bytes:
        return ""
    running = {key: one.memory_bytes >> 20 for key, one in machine.disk.engines.items()}
    return f"{machine.name} has {machine.memory_bytes >> 20} MiB, and {engine.nonce} makes it {running}"
