"""Schedules for operators: stored, listed and removed; and the explanation of where a model could go, node by node.

The reconciler does what a schedule says. Writing one lets it be tried at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from enginehouse.core.errors import Invalid, NotFound, Unavailable
from enginehouse.core.model import Model
from enginehouse.core.name import check_model_name
from enginehouse.core.placement import NoRoom, Placement, Rejection, judge, place
from enginehouse.core.remedies import remedies
from enginehouse.core.schedule import LoadInfo, Schedule, ScheduleRequest, checked
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.localai.builds import builds_for
from enginehouse.frontend.serving.rooms import least_wanted, needs_of, read_fleet, rooms_for
from enginehouse.frontend.serving.router import model_not_found
from enginehouse.store import db, load_infos, models, nodes, schedules
from enginehouse.store.db import Connection, Store

log = logging.getLogger(__name__)


class ScheduleState(Struct, frozen=True):
    """A schedule and how it fares."""

    schedule: Schedule
    info: LoadInfo


class NodeVerdict(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether one node could take another replica, and why not."""

    node_id: str
    node_name: str
    fits: bool
    obstacle: str = ""
    reason: str = ""


class Explanation(Struct, frozen=True, kw_only=True):
    model: str
    needs_bytes: int
    needs_from: str  # configured, measured, estimated or unknown
    replicas: int
    wanted: int
    chosen: str  # the name of the node that another replica would get; "" if none fits
    stops: tuple[str, ...]  # idle models that would make room
    nodes: tuple[NodeVerdict, ...]
    would_help: tuple[str, ...]  # what would have to change, if none fits
    last_failure: str
    retry_in_seconds: float | None  # None if nothing waits


class Schedules:
    def __init__(
        self, store: Store, galleries: Galleries, wake: Callable[[], None], *, has_carrier: bool = False
    ) -> None:
        self._store = store
        self._galleries = galleries
        self._wake = wake
        self._has_carrier = has_carrier

    async def every(self) -> list[ScheduleState]:
        def work(connection: Connection) -> list[ScheduleState]:
            return [
                ScheduleState(one, load_infos.get(connection, one.model_name)) for one in schedules.every(connection)
            ]

        return await self._store.read(work)

    async def get(self, model: str) -> ScheduleState:
        def work(connection: Connection) -> ScheduleState:
            found = schedules.get(connection, model)
            if found is None:
                raise NotFound(f"cannot find a schedule for {model}: it has none", code="not_found", param="model")
            return ScheduleState(found, load_infos.get(connection, model))

        return await self._store.read(work)

    async def put(self, request: ScheduleRequest) -> ScheduleState:
        def work(connection: Connection) -> ScheduleState:
            made = checked(request, schedules.get(connection, request.model_name))
            self._row(connection, check_model_name(made.model_name))
            stored = schedules.put(connection, made, db.now(connection))
            load_infos.forgive(connection, made.model_name)
            return ScheduleState(stored, load_infos.get(connection, made.model_name))

        stored = await self._store.transaction(work)
        self._wake()
        return stored

    async def put_all(self, items: Sequence[Mapping[str, Any]], origin: str) -> None:
        """Store the schedules of a file, or none if one of them cannot be used. A model that is not here yet is left
        out: it may be added later, before the next start.
        """

        def work(connection: Connection) -> list[str]:
            unknown = []
            for item in items:
                request = _request_of(item, origin)
                made = checked(request, schedules.get(connection, request.model_name))
                try:
                    self._row(connection, check_model_name(made.model_name))
                except NotFound:
                    unknown.append(made.model_name)
                    continue
                schedules.put(connection, made, db.now(connection))
                load_infos.forgive(connection, made.model_name)
            return unknown

        for model in await self._store.transaction(work):
            log.warning("schedule.skipped model=%s file=%s reason=%r", model, origin, "there is no such model")

    async def remove(self, model: str) -> None:
        def work(connection: Connection) -> None:
            if not schedules.remove(connection, model):
                raise NotFound(f"cannot remove the schedule of {model}: it has none", code="not_found", param="model")

        await self._store.transaction(work)
        self._wake()

    async def explain(self, name: str) -> Explanation:
        """Where another replica of a model would go, and per node why not."""

        def work(connection: Connection) -> Explanation:
            model = models.get(connection, name) or self._galleries.model(name)
            if model is None:
                raise model_not_found(name)
            return self._explain(connection, model)

        return await self._store.read(work)

    def _row(self, connection: Connection, name: str) -> None:
        """The model must be there; one of a gallery becomes a row."""
        if models.get(connection, name) is None:
            offered = self._galleries.model(name)
            if offered is None:
                raise model_not_found(name)
            models.add(connection, offered, db.now(connection))

    def _explain(self, connection: Connection, model: Model) -> Explanation:
        now = db.now(connection)
        every = nodes.every(connection)
        fleet = read_fleet(connection, every, now)
        try:
            builds, _ = builds_for(self._galleries, model.backend, every, has_carrier=self._has_carrier)
        except (NotFound, Unavailable):
            builds = {}
        needs = needs_of(fleet, model, builds, may_replace=False)
        rooms = rooms_for(connection, fleet, model)
        found = place(needs, rooms)
        names = {node.id: node.name for node in every}
        info = load_infos.get(connection, model.name)
        serving = nodes.serving(connection)
        return Explanation(
            model=model.name,
            needs_bytes=needs.demand.memory_bytes,
            needs_from=needs.demand.origin,
            replicas=sum(
                one.replica.model == model.name and not one.leaving and one.replica.node_id in serving
                for one in fleet.replicas
            ),
            wanted=least_wanted(fleet, model.name),
            chosen=names[found.node_id] if isinstance(found, Placement) else "",
            stops=() if isinstance(found, NoRoom) else tuple(dict.fromkeys(one.model for one in found.stops)),
            nodes=tuple(_verdict(room.node.id, room.node.name, judge(needs, room)) for room in rooms),
            would_help=remedies(needs, rooms) if isinstance(found, NoRoom) else (),
            last_failure=info.reason,
            retry_in_seconds=max(0.0, info.retry_at - now) if info.retry_at > now else None,
        )


def _request_of(item: Mapping[str, Any], origin: str) -> ScheduleRequest:
    try:
        return msgspec.convert(item, ScheduleRequest)
    except msgspec.ValidationError as error:
        raise Invalid(
            f"cannot use a schedule of {origin}: {error}", code="invalid_setting", param="schedules"
        ) from None


def _verdict(node_id: str, name: str, found: int | Rejection) -> NodeVerdict:
    if isinstance(found, Rejection):
        return NodeVerdict(node_id=node_id, node_name=name, fits=False, obstacle=found.obstacle, reason=found.reason)
    return NodeVerdict(node_id=node_id, node_name=name, fits=True)
