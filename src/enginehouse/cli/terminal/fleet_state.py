"""The state of the cluster as the event stream tells it: nodes, operations, models, figures, and how old that is.

Pure: no input or output, and the time is an argument (`at`, monotonic seconds). The caller reads the lists that
`wanted_lists` names and passes everything that arrives to `take_event` and `take_list`; then the state is right
whatever was lost, repeated or came late. What a frontend does not tell is None, never 0.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import Literal

import msgspec
from msgspec import Struct

from enginehouse.cli.answers import ListedBackend, OperationPage, StoredSchedule
from enginehouse.cli.terminal.rates import Meter
from enginehouse.cli.terminal.seen import SeenTable, bytes_of, later_operation
from enginehouse.core.ids import NodeId, OperationId
from enginehouse.core.views import ModelView, NodeView, OperationView, Upgrade

ListName = Literal["nodes", "operations", "models", "schedules", "backends", "upgrades"]
LISTS: tuple[ListName, ...] = ("nodes", "operations", "models", "schedules", "backends", "upgrades")
# How often a list is read again of which no event tells.
PERIODS: dict[ListName, float] = {"schedules": 10.0, "upgrades": 60.0, "backends": 60.0}
# A frontend that sends no figures of nodes: their heartbeats are then only in the list.
NODES_SECONDS = 10.0
AGAIN_SECONDS = 2.0  # a list is not read more often, whatever happens
PULSE_SECONDS = 12.0  # two pulses and some slack; figures that are older are unknown
SILENT_SECONDS = 8.0  # the stream says something every five seconds
KEPT_OPERATIONS = 200  # that have ended

Moment = str | float | None


class SeenTraffic(Struct, frozen=True):
    requests_per_second: float | None = None
    tokens_per_second: float | None = None
    time_to_first_token_seconds: float | None = None
    errors_per_second: float | None = None
    in_flight: int | None = None
    queued: int | None = None


class SeenFigures(Struct, frozen=True):
    """What the last pulse said of one node."""

    heard_at: Moment = None
    available_ram: int | None = None
    available_vram: int | None = None
    available_disk: int | None = None
    used_cores: float | None = None
    in_flight: int | None = None
    requests_per_second: float | None = None


class SeenPulse(Struct, frozen=True):
    at: Moment = None
    traffic: SeenTraffic = SeenTraffic()
    nodes: dict[NodeId, SeenFigures] = {}
    models: dict[str, SeenTraffic] = {}


class Arrival(Struct, frozen=True):
    """What arrives from the frontend: a change of the connection, an event, or a list. `name` is the kind of the event,
    the list, or the reason of a refusal.
    """

    what: Literal["connected", "disconnected", "event", "list", "unread", "refused"]
    at: float
    name: str = ""
    body: object = None
    began: float = 0.0  # of a list: when it was asked for


class _NodeIds(Struct):
    nodes: list[NodeId] | None = None
    id: NodeId = NodeId("")


_UNKNOWN = SeenTraffic()
_NO_FIGURES = SeenFigures()


class FleetState:
    def __init__(self) -> None:
        self.nodes: SeenTable[NodeId, NodeView] = SeenTable()
        self.models: SeenTable[str, ModelView] = SeenTable()
        self.operations: dict[OperationId, OperationView] = {}
        self.schedules: dict[str, StoredSchedule] = {}
        self.backends: tuple[ListedBackend, ...] = ()
        self.upgrades: dict[str, Upgrade] = {}
        self.is_connected = False
        self.is_refused = False  # the frontend answers, and does not let this token see events
        self.heard_at: float | None = None  # when the stream last said anything
        self._figures: SeenTable[NodeId, SeenFigures] = SeenTable()
        self._heartbeats: dict[NodeId, float] = {}
        self._traffic = _UNKNOWN
        self._model_traffic: dict[str, SeenTraffic] = {}
        self._pulse_at: float | None = None
        self._meters: dict[OperationId, Meter] = {}
        self._wanted: set[ListName] = set(LISTS)
        self._read_at: dict[ListName, float] = {}
        self._resumed_models: set[str] | None = None

    # What arrives --------------------------------------------------------------------------------

    def take(self, arrived: Arrival) -> None:
        name = arrived.name
        match arrived.what:
            case "connected":
                self.connected(arrived.at, is_resumed=bool(name))
            case "disconnected" | "refused":
                self.disconnected(is_refused=arrived.what == "refused")
            case "event" if isinstance(arrived.body, bytes):
                self.take_event(name, arrived.body, arrived.at)
            case "list" if name in LISTS:
                # An answer of another version that cannot be read leaves what is known.
                with suppress(msgspec.ValidationError):
                    self.take_list(name, arrived.body, arrived.began, arrived.at)
            case "unread" if name in LISTS:
                self.want(name)

    def connected(self, at: float, *, is_resumed: bool) -> None:
        """The stream is open. One that could not be resumed says nothing of what happened before it."""
        self.is_connected, self.heard_at = True, at
        self._resumed_models = set() if is_resumed else None
        if not is_resumed:
            self._wanted.update(LISTS)

    def disconnected(self, *, is_refused: bool = False) -> None:
        self.is_connected, self.is_refused = False, is_refused
        self._resumed_models = None

    def heard(self, at: float) -> None:
        self.heard_at = max(at, self.heard_at or at)

    def take_event(self, kind: str, body: bytes, at: float) -> None:
        """An event of the stream. Kinds that this version does not know change nothing."""
        self.heard(at)
        try:
            self._take(kind, body, at)
        except msgspec.DecodeError:
            self._wanted.update(LISTS)  # what it said is in the lists

    def _take(self, kind: str, body: bytes, at: float) -> None:
        match kind:
            case "operation":
                self.note_operation(msgspec.json.decode(body, type=OperationView), at)
            case "node":
                self._note_node(msgspec.json.decode(body, type=NodeView), at)
            case "node-removed":
                self._remove_node(msgspec.json.decode(body, type=_NodeIds).id, at)
            case "model":
                model = msgspec.json.decode(body, type=ModelView)
                self.models.put(model.name, model, at)
                if self._resumed_models is not None:
                    self._resumed_models.add(model.name)
            case "pulse":
                self._note_pulse(msgspec.json.decode(body, type=SeenPulse), at)
            case "caught-up" | "overflow":
                self._keep_present(msgspec.json.decode(body, type=_NodeIds).nodes, at, is_all=kind == "caught-up")

    def _keep_present(self, present: list[NodeId] | None, at: float, *, is_all: bool) -> None:
        """What the stream did not name after it was resumed is gone."""
        if present is not None:
            for node_id in set(self.nodes.rows).difference(present):
                self._remove_node(node_id, at)
        if not is_all:
            self._wanted.update(LISTS)
        elif self._resumed_models is not None:
            self.models.keep_only(self._resumed_models, at)
            self._wanted.update(("schedules", "backends", "upgrades"))
        self._resumed_models = None

    def take_list(self, name: ListName, answer: object, began: float, at: float) -> None:
        """The answer to a list that was asked for at `began`."""
        self._read_at[name] = at
        match name:
            case "nodes":
                listed = {one.id: one for one in msgspec.convert(answer, tuple[NodeView, ...])}
                before = set(self.nodes.rows)
                self.nodes.replace(listed, began, at)
                for node in listed.values():
                    self._note_heartbeat(node, at)
                for node_id in before.difference(self.nodes.rows):
                    self._figures.remove(node_id, at)
            case "operations":
                for view in msgspec.convert(answer, OperationPage).operations:
                    self.note_operation(view, at)
            case "models":
                found = {one.name: one for one in msgspec.convert(answer, tuple[ModelView, ...])}
                self.models.replace(found, began, at)
            case "schedules":
                self.schedules = {one.model_name: one for one in msgspec.convert(answer, tuple[StoredSchedule, ...])}
            case "backends":
                self.backends = msgspec.convert(answer, tuple[ListedBackend, ...])
            case "upgrades":
                self.upgrades = msgspec.convert(answer, dict[str, Upgrade])

    def note_operation(self, view: OperationView, at: float) -> None:
        known = self.operations.get(view.jobID)
        if known is None and view.partial:
            self._wanted.add("operations")  # the stream tells a change of what was never told
            return
        self.operations[view.jobID] = later = later_operation(known, view) if known else view
        done, total = bytes_of(later)
        if total and not later.has_ended:
            self._meters.setdefault(view.jobID, Meter()).note(at, done)
        if later.has_ended and not (known and known.has_ended):
            self._meters.pop(view.jobID, None)
            self._wanted.update(("backends", "upgrades") if later.isBackend else ("models", "schedules"))
            self._prune()

    def _prune(self) -> None:
        ended = sorted((one.createdAt, one.jobID) for one in self.operations.values() if one.has_ended)
        for _, operation_id in ended[: max(0, len(ended) - KEPT_OPERATIONS)]:
            del self.operations[operation_id]

    def _note_node(self, node: NodeView, at: float) -> None:
        known = self.nodes.rows.get(node.id)
        if known is not None and _is_older(node, known):
            return
        if known is None or known.backends != node.backends:
            self._wanted.add("backends")
        self.nodes.put(node.id, node, at)
        self._note_heartbeat(node, at)

    def _note_heartbeat(self, node: NodeView, at: float) -> None:
        if node.heartbeat_age_seconds is not None:
            heard = at - node.heartbeat_age_seconds
            self._heartbeats[node.id] = max(heard, self._heartbeats.get(node.id, heard))

    def _remove_node(self, node_id: NodeId, at: float) -> None:
        self.nodes.remove(node_id, at)
        self._figures.remove(node_id, at)
        self._heartbeats.pop(node_id, None)
        self._wanted.add("backends")

    def _note_pulse(self, pulse: SeenPulse, at: float) -> None:
        self._traffic, self._model_traffic, self._pulse_at = pulse.traffic, dict(pulse.models), at
        now = _seconds(pulse.at)
        for node_id, figures in pulse.nodes.items():
            self._figures.put(node_id, figures, at)
            heard = _seconds(figures.heard_at)
            if now is not None and heard is not None:
                self._heartbeats[node_id] = max(at - max(0.0, now - heard), self._heartbeats.get(node_id, 0.0))

    # What is to be read --------------------------------------------------------------------------

    def want(self, *names: ListName) -> None:
        """Read these lists, also after one could not be read."""
        self._wanted.update(names)

    def wanted_lists(self, at: float) -> list[ListName]:
        """The lists to read now, each once: asking takes them off. None while the frontend is away."""
        if not self.is_connected:
            return []
        due = {name for name, period in PERIODS.items() if at - self._read_at.get(name, at) >= period}
        if not self._has_pulse(at) and at - self._read_at.get("nodes", at) >= NODES_SECONDS:
            due.add("nodes")
        ready = [
            name for name in LISTS if name in self._wanted | due and at - self._read_at.get(name, -9e9) >= AGAIN_SECONDS
        ]
        self._wanted.difference_update(ready)
        self._read_at |= dict.fromkeys(ready, at)
        return ready

    # What is known -------------------------------------------------------------------------------

    @property
    def has_lists(self) -> bool:
        """Whether nodes and operations were ever heard of; before that there is nothing to show."""
        return bool(self.nodes.rows or self.operations or self.models.rows)

    def silence(self, at: float) -> float | None:
        """For how long the stream has said nothing; None if it never said anything."""
        return None if self.heard_at is None else max(0.0, at - self.heard_at)

    def is_live(self, at: float) -> bool:
        silence = self.silence(at)
        return self.is_connected and silence is not None and silence < SILENT_SECONDS

    def traffic(self, at: float) -> SeenTraffic:
        return self._traffic if self._has_pulse(at) else _UNKNOWN

    def traffic_of(self, model: str, at: float) -> SeenTraffic:
        return self._model_traffic.get(model, _UNKNOWN) if self._has_pulse(at) else _UNKNOWN

    def figures(self, node: NodeView) -> SeenFigures:
        """The last figures of a node: those of its pulse, or of its row where that was heard later."""
        seen = self._figures.rows.get(node.id, _NO_FIGURES)
        is_newer = self._figures.heard.get(node.id, -1.0) >= self.nodes.heard.get(node.id, 0.0)
        amounts = {name: getattr(seen, name) if is_newer else None for name in _AMOUNTS}
        return msgspec.structs.replace(
            seen, **{name: getattr(node, name) if amount is None else amount for name, amount in amounts.items()}
        )

    def heartbeat_age(self, node_id: NodeId, at: float) -> float | None:
        heard = self._heartbeats.get(node_id)
        return None if heard is None else max(0.0, at - heard)

    def rate_of(self, operation_id: OperationId) -> float:
        meter = self._meters.get(operation_id)
        return meter.rate() if meter else 0.0

    def _has_pulse(self, at: float) -> bool:
        return self._pulse_at is not None and at - self._pulse_at < PULSE_SECONDS


_AMOUNTS = ("available_ram", "available_vram", "available_disk")


def _seconds(moment: Moment) -> float | None:
    """A time of the frontend, as seconds or as RFC 3339."""
    if not isinstance(moment, str):
        return moment
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return None


def _is_older(new: NodeView, known: NodeView) -> bool:
    before, after = _seconds(known.updated_at), _seconds(new.updated_at)
    return before is not None and after is not None and after < before


PATHS: dict[ListName, str] = {
    "nodes": "/api/nodes",
    "operations": "/api/operations",
    "models": "/api/models",
    "schedules": "/api/nodes/scheduling",
    "backends": "/backends",
    "upgrades": "/backends/upgrades",
}
