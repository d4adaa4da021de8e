"""Views of models: what is served, what a gallery offers, and where each runs.

Reads only. An event is published if a view differs from the last one published, so a change is noticed whatever caused
it: a load, a worker that lost a process, a node that went away, another frontend.
"""

from __future__ import annotations

import msgspec

from enginehouse.core.ids import NodeId
from enginehouse.core.model import Model
from enginehouse.core.replica import Replica
from enginehouse.core.views import ModelView, ReplicaView
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.watching.events import Events
from enginehouse.store import models, nodes, operations, replicas
from enginehouse.store.db import Connection, Store


def reachable(connection: Connection, model: str | None = None) -> list[Replica]:
    """Return the replicas, of one model or all, on nodes that are neither offline nor drained."""
    return list(_reachable(connection, model)[0])


def _reachable(connection: Connection, model: str | None) -> tuple[list[Replica], dict[NodeId, str]]:
    """With the names of their nodes."""
    found = [one for one in replicas.serving(connection) if model in (None, one.model)]
    names = nodes.serving_among(connection, (one.node_id for one in found))
    return [one for one in found if one.node_id in names], names


class ModelViews:
    def __init__(self, store: Store, galleries: Galleries, events: Events) -> None:
        self._store = store
        self._galleries = galleries
        self._events = events
        self._told: dict[str, ModelView] | None = None

    async def every(self) -> list[ModelView]:
        """Return every model that is served or offered, by name."""
        return await self._store.read(self._read)

    def _read(self, connection: Connection) -> list[ModelView]:
        running: dict[str, list[ReplicaView]] = {}
        found, names = _reachable(connection, None)
        for replica in found:
            view = ReplicaView(replica.node_id, names[replica.node_id], replica.slot)
            running.setdefault(replica.model, []).append(view)
        loading = {operation.name for operation in operations.steered(connection)}
        rows = {model.name: (model, at) for model, at in models.every(connection)}
        offered = [(model, 0.0) for model in self._galleries.models() if model.name not in rows]
        elsewhere = {model.name for model, _ in rows.values() if model.endpoint}
        views = []
        for model, created_at in sorted([*rows.values(), *offered], key=lambda pair: pair[0].name):
            served_as = model.alias or model.name
            state = "added" if model.name in rows else "available"
            if served_as in loading:
                state = "loading"
            if served_as in running or served_as in elsewhere:
                state = "loaded"
            views.append(_view(model, state, running.get(served_as, []), created_at))
        return views

    async def step(self) -> None:
        """Publish the models that changed since the last step."""
        if not self._events.is_watched:
            self._told = None  # the next watcher begins with a full read
            return
        views = {view.name: view for view in await self.every()}
        told, self._told = self._told, views
        if told is None:
            return
        for name, view in views.items():
            if told.get(name) != view:
                self._events.publish("model", name, msgspec.json.encode(view))
        for name in told.keys() - views.keys():
            self._events.publish("model-removed", name, msgspec.json.encode({"name": name}))


def _view(model: Model, state: str, running: list[ReplicaView], created_at: float) -> ModelView:
    return ModelView(
        name=model.name,
        backend=model.backend,
        description=model.description,
        license=model.license,
        size_bytes=model.size_bytes,
        state=state,
        options=model.options,
        replicas=tuple(running),
        created_at=created_at,
    )
