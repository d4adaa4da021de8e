"""What a key does to what the cursor is on: a question, one request, and the sentence afterwards.

Nothing is requested here. Whether it is allowed is the frontend's decision: its sentence is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

from msgspec import Struct

from enginehouse.cli.terminal.fleet_state import FleetState, ListName
from enginehouse.cli.terminal.fleet_words import counted, title
from enginehouse.cli.terminal.top.drawing import Target
from enginehouse.core.ids import NodeId, OperationId
from enginehouse.core.views import NodeView, OperationView


class Act(Struct, frozen=True, kw_only=True):
    method: str
    path: str
    done: str  # the sentence when it was accepted
    body: Mapping[str, object] | None = None
    heading: str = ""
    says: tuple[str, ...] = ()  # what is said before it is done
    question: str = ""  # to be answered with y or n
    typed: str = ""  # what has to be typed, as a confirmation
    number: str = ""  # the question for a number, which becomes `replicas`
    plan: Mapping[str, object] | None = None  # shown first
    reads: tuple[ListName, ...] = ()  # lists that it changes; the stream tells of most changes


def act_of(key: str, target: Target, state: FleetState) -> Act | str:
    """What the key does, or the sentence why it does nothing here."""
    match target.kind:
        case "node" if (node := state.nodes.rows.get(NodeId(target.id))) is not None:
            return _on_node(key, node)
        case "operation" if (operation := state.operations.get(OperationId(target.id))) is not None:
            return _on_operation(key, operation, title(operation, state), target.node)
        case "backend":
            return _on_backend(key, target.id)
        case "model":
            return _on_model(key, target.id, state)
        case _:
            return "Nothing is selected."


def keys_of(kind: str) -> str:
    """The keys that act on a thing of this kind."""
    return {
        "node": "a approve · d drain · r resume · x remove",
        "operation": "c cancel · r retry · D dismiss",
        "backend": "u upgrade",
        "model": "l load · u unload · s scale",
    }.get(kind, "")


def _on_node(key: str, node: NodeView) -> Act | str:
    path = f"/api/nodes/{quote(node.id, safe='')}"
    match key:
        case "a" if node.approved:
            return f"{node.name} is approved already."
        case "a":
            return Act(
                method="POST",
                path=f"{path}/approve",
                heading=f"Approve {node.name}?",
                says=(
                    "It may then run engines and gets models. Compare the fingerprint with what `enginehouse join` "
                    "shows on that machine.",
                    f"Fingerprint: {node.fingerprint or 'none; it has no key'}",
                    f"Address: {node.address or 'unknown'}   Platform: {node.platform or 'unknown'}",
                    *((node.waits_for,) if node.waits_for else ()),
                ),
                question=f"Approve {node.name}?",
                done=f"{node.name} is approved",
                reads=("nodes",),
            )
        case "d":
            says = "Its replicas stop when their answers have ended; it gets no more work until it is resumed."
            return Act(
                method="POST",
                path=f"{path}/drain",
                heading=f"Drain {node.name}",
                says=(says,),
                question=f"Drain {node.name}?",
                done=f"{node.name} is being drained",
                reads=("nodes",),
            )
        case "r":
            return Act(method="POST", path=f"{path}/resume", done=f"{node.name} is resumed", reads=("nodes",))
        case "x":
            says = "Its waiting operations are cancelled. A worker that still runs there registers again as pending."
            return Act(
                method="DELETE",
                path=f"{path}?force=true",  # who typed the name means it
                says=(f"Type {node.name} to remove it. {says}",),
                typed=node.name,
                done=f"{node.name} is removed",
                reads=("nodes", "backends"),
            )
    return _nothing(key, "node")


def _on_operation(key: str, operation: OperationView, name: str, node: str) -> Act | str:
    path = f"/api/operations/{quote(operation.jobID, safe='')}"
    where, body = (f" on {node}", {"node": node}) if node else ("", None)
    match key:
        case "c" if operation.has_ended:
            return f"{name} has ended already."
        case "c":
            return Act(
                method="POST",
                path=f"{path}/cancel",
                body=body,
                heading=f"Cancel: {name}{where}",
                says=("Workers stop at once and keep what they had before.",),
                question="Cancel it?",
                done=f"{name} is cancelled{where}",
            )
        case "r":
            return Act(method="POST", path=f"{path}/retry", body=body, done=f"{name} is tried again{where}.")
        case "D":
            return Act(method="POST", path=f"{path}/dismiss", done=f"{name} is dismissed", reads=("operations",))
    return _nothing(key, "operation")


def _on_backend(key: str, name: str) -> Act | str:
    if key != "u":
        return _nothing(key, "backend")
    body = {"kind": "upgrade", "name": name}
    return Act(
        method="POST",
        path="/api/operations",
        body=body,
        plan=body,
        heading=f"Upgrade {name}",
        done=f"Upgrade {name} is accepted",
    )


def _on_model(key: str, name: str, state: FleetState) -> Act | str:
    path = f"/api/models/{quote(name, safe='')}"
    match key:
        case "l":
            return Act(method="POST", path=f"{path}/load", done=f"Load {name} is accepted")
        case "u":
            model = state.models.rows.get(name)
            count = len(model.replicas) if model else 0
            return Act(
                method="POST",
                path=f"{path}/unload",
                heading=f"Unload {name}",
                says=(f"{counted(count, 'replica')} of it will stop.",),
                question=f"Unload {name}?",
                done=f"Unload {name} is accepted",
                reads=("schedules",),
            )
        case "s":
            schedule = state.schedules.get(name)
            return Act(
                method="POST",
                path="/api/nodes/scheduling",
                body={"model_name": name, "node_selector": schedule.selector if schedule else {}},
                number=f"How many replicas of {name} are wanted? 0 keeps none.",
                done=f"The replicas of {name} are set",
                reads=("schedules",),
            )
    return _nothing(key, "model")


def _nothing(key: str, kind: str) -> str:
    return f"{key} does nothing to a {kind} ({keys_of(kind)})"


ACTING = frozenset("adrxcDuls")
