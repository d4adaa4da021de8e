"""Shows what a request would do on each node, without doing it.

The plan uses the same choice of targets as the request itself, and adds download sizes and free disk space. It writes
nothing but the listings of LocalAI's workers, which are polled first because they send no reports.
"""

from __future__ import annotations

from msgspec import UNSET

from enginehouse.core import backend as backends
from enginehouse.core.action import Action, InstallBackend
from enginehouse.core.canary import Canary
from enginehouse.core.node import Node
from enginehouse.core.operation import BackendRequest, width_of
from enginehouse.core.views import FleetPlan, NodePlan
from enginehouse.frontend.operations.canary_choice import begin_canary
from enginehouse.frontend.operations.checks import check_backend_request
from enginehouse.frontend.operations.targets import Freshen, TargetChoice, Targets, use_last_reports
from enginehouse.frontend.operations.versions import Versions
from enginehouse.store.db import Connection, Store

UNKNOWN_NOTE = "its worker records no digest, so the installed version is unknown; an upgrade downloads it again"


class Planner:
    def __init__(self, store: Store, targets: Targets, versions: Versions, freshen: Freshen = use_last_reports) -> None:
        self._store = store
        self._targets = targets
        self._versions = versions
        self._freshen = freshen

    async def plan(self, request: BackendRequest) -> FleetPlan:
        check_backend_request(request)
        unknown = await self._targets.prepare(self._store, request, self._freshen)

        def work(connection: Connection) -> tuple[TargetChoice, Canary | None]:
            found = self._targets.choose(connection, request, unknown)
            actions = [(node.id, action) for node, action in found.actions]
            return found, begin_canary(connection, actions, self._targets.canary_rules, is_wanted=request.canary)

        chosen, canary = await self._store.read(work)
        rows = [self._row(request, node, action) for node, action in chosen.actions]
        rows.sort(key=lambda row: row.node_name)
        return FleetPlan(
            kind=request.kind,
            name=request.name,
            nodes=rows,
            excluded=chosen.excluded,
            canaries=[one.name for one in canary.nodes] if canary is not None else [],
            max_parallel=width_of(request.kind, request.max_parallel, chosen.fleet),
            download_bytes=sum(row.download_bytes for row in rows if row.download_bytes),
        )

    def _row(self, request: BackendRequest, node: Node, action: Action) -> NodePlan:
        row = NodePlan(
            node_id=node.id,
            node_name=node.name,
            node_status=node.status,
            does="delete",
            capability=node.capability,
            platform=node.platform,
            free_disk_bytes=node.capacity.available_disk if node.capacity.total_disk else UNSET,
        )
        if not isinstance(action, InstallBackend):
            return row
        build = action.resolved
        installed = backends.find(node.report.backends, build.directory)
        row.backend, row.uri, row.source = build.directory, build.uri, build.source or UNSET
        row.version, row.digest = build.version or UNSET, build.digest or UNSET
        row.does = "install" if installed is None else "roll back" if action.returns else "upgrade"
        if installed is not None:
            row.installed_version = installed.version or UNSET
            row.installed_digest = installed.digest or UNSET
            if action.keep or backends.is_version(installed.digest, build):
                row.does = "reinstall" if request.force else "nothing"
            elif not installed.digest:
                row.note = UNKNOWN_NOTE
        known = self._versions.known(build) if row.does not in ("nothing", "roll back") else None
        if known is not None and known.size_bytes:
            row.download_bytes = known.size_bytes
        if known is not None and known.failure:
            row.note = f"the available version is unknown: {known.failure}"
        if build.remark and row.note is UNSET:
            row.note = build.remark
        return row
