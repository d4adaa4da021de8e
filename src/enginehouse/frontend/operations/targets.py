"""Chooses the target nodes of a request about a backend and the action of each, with a reason for every node left out.

The choice is made once, from one snapshot of the nodes and galleries, and is shown in the operation. A node that is
away is a target: its intent waits. A node is left out if it waits for approval, is of another type, has no build, or
does not have the backend to upgrade.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Collection, Sequence

import msgspec
from msgspec import Struct

from enginehouse.core import backend as backends
from enginehouse.core.action import Action, InstallBackend, RemoveBackend, subject_of
from enginehouse.core.backend import InstalledBackend, Resolved
from enginehouse.core.changes import nodes_after
from enginehouse.core.errors import Conflict, EnginehouseError, Hopeless, Invalid, NotFound, Unavailable
from enginehouse.core.external import external_build
from enginehouse.core.ids import NodeId
from enginehouse.core.installation import directory_behind
from enginehouse.core.intent import Intent
from enginehouse.core.listing import installed_at
from enginehouse.core.node import MAX_WAITING, Node
from enginehouse.core.operation import BackendRequest, Excluded
from enginehouse.core.reference import parse_uri
from enginehouse.frontend.fleet.nodes import find_node
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.operations.canary_choice import NO_SETTINGS, CanaryRules
from enginehouse.frontend.operations.rollbacks import choose_rollbacks
from enginehouse.frontend.operations.versions import Versions
from enginehouse.store import intents, nodes
from enginehouse.store.db import Connection, Store

Unknown = Collection[NodeId]
# Refreshes the state of these nodes, or of all; returns the ids of nodes whose state is unknown.
Freshen = Callable[[Collection[str] | None], Awaitable[Unknown]]
WAITS = "it waits for approval"
UNKNOWN = "unknown"  # the code of a node that is left out because its state is unknown
UNKNOWN_REASON = "its worker did not answer which backends it has; retry when it answers"


async def use_last_reports(_nodes: Collection[str] | None) -> Unknown:
    """Use the last reports: for a cluster without workers that have to be polled."""
    return ()


class TargetChoice(Struct, frozen=True):
    """The targets of a request."""

    actions: list[tuple[Node, Action]]
    excluded: list[Excluded]
    fleet: int  # approved nodes that take backends


class Targets:
    """Chooses targets. Reads the nodes through the given connection and the catalogue as it is now."""

    def __init__(self, galleries: Galleries, versions: Versions, canary_rules: CanaryRules = NO_SETTINGS) -> None:
        self.canary_rules = canary_rules
        self._galleries = galleries
        self._versions = versions

    def choose(self, connection: Connection, request: BackendRequest, unknown: Unknown = frozenset()) -> TargetChoice:
        """Choose the targets. `unknown` are the nodes whose state is unknown (`Listings.freshen`)."""
        every = nodes.every(connection)
        targets, reasons = _asked_for(connection, every, request)
        changes = self._changing(connection, request, targets)
        targets = nodes_after(targets, changes)
        try:
            match request.kind:
                case "delete":
                    actions = self._removals(request, targets, reasons)
                case "upgrade":
                    actions = self._upgrades(request, targets, reasons)
                case "rollback":
                    if all(directory_behind(node.report.backends, request.plain_name) is None for node in targets):
                        self._galleries.known(request.name)  # raises for an unknown name
                    actions = choose_rollbacks(request, targets, reasons)
                case _:
                    actions = self._installs(request, targets, reasons)
        except NotFound:
            actions = []
            reasons |= {node.id: UNKNOWN_REASON for node in targets if node.id in unknown}
            if request.kind == "install" or not reasons.keys() & set(unknown):
                raise
        is_sure = request.kind == "install"  # the installed backends do not matter then
        excluded = [
            Excluded(node.id, node.name, UNKNOWN_REASON, UNKNOWN)
            if node.id in unknown and not is_sure
            else Excluded(node.id, node.name, reasons[node.id])
            for node in every
            if node.id in reasons
        ]
        if not actions:
            raise _nothing_to_do(request, excluded)
        actions = [(node, _with_before(action, node)) for node, action in actions]
        return TargetChoice(actions, excluded, sum(node.is_target for node in every))

    def _changing(self, connection: Connection, request: BackendRequest, targets: Sequence[Node]) -> list[Intent]:
        """Return the intents about this backend on these nodes that are open or ended after the last report."""
        plain = request.plain_name
        directories = {plain, *(directory_behind(node.report.backends, plain) or plain for node in targets)}
        with contextlib.suppress(EnginehouseError):
            builds, _ = self._galleries.resolve_each(request.name, targets)
            directories |= {build.directory for build in builds.values()}
        changes = intents.changing(connection, targets, (f"backend:{one}" for one in directories))
        removals = [one for one in changes if isinstance(one.action, RemoveBackend)]
        if request.kind == "delete":
            # A backend that is being deleted, or was just deleted, may be deleted again.
            changes = [one for one in changes if one not in removals]
        elif request.kind in ("upgrade", "rollback"):
            # An open delete has not happened yet: the newer request supersedes it.
            changes = [one for one in changes if one not in removals or not one.is_open]
        return changes

    def again(self, connection: Connection, actions: Sequence[tuple[NodeId, Action]]) -> list[tuple[NodeId, Action]]:
        """Renew actions for a retry: a tag may have moved, and the node may have the backend by now."""
        here = {node_id: nodes.get(connection, node_id) for node_id, _ in actions}
        subjects = {subject_of(action) for _, action in actions}
        found = [node for node in here.values() if node is not None]
        after = {node.id: node for node in nodes_after(found, intents.changing(connection, found, subjects))}
        return [(node_id, self._renewed(action, after.get(node_id))) for node_id, action in actions]

    def _renewed(self, action: Action, node: Node | None) -> Action:
        if not isinstance(action, InstallBackend) or node is None or action.returns:
            return action  # a version that was there before is what it was
        is_plain = not (action.force or action.upgrade or action.is_external)
        renewed = msgspec.structs.replace(
            action,
            resolved=self._versions.renewed(action.resolved),
            keep=is_plain and _is_kept(action.resolved, node),
        )
        return _with_before(renewed, node)

    async def prepare(self, store: Store, request: BackendRequest, freshen: Freshen) -> Unknown:
        """Refresh the state of the nodes and resolve the versions of the builds, before `choose`. Returns the nodes
        whose state is unknown. Runs outside of any transaction, because workers and registries may be slow.
        """
        unknown = await freshen(request.nodes)
        if request.kind in ("install", "upgrade"):
            builds = await store.read(lambda connection: self._builds_in_question(connection, request))
            await self._versions.resolve(builds, insist=request.insists)
        return unknown

    def _builds_in_question(self, connection: Connection, request: BackendRequest) -> list[Resolved]:
        """Return the builds whose versions `choose` may need. It decides nothing: a build too many costs one question,
        and a request that cannot be fulfilled is refused by `choose`.
        """
        found: list[Resolved] = []
        with contextlib.suppress(EnginehouseError):
            targets, _ = _asked_for(connection, nodes.every(connection), request)
            if request.uri:
                return [_external_build(request, node) for node in targets]
            if request.kind == "install":
                return list(self._galleries.resolve_each(request.name, targets)[0].values())
            for node in nodes_after(targets, self._changing(connection, request, targets)):
                installed = self._held(request, node)
                if installed is not None:
                    with contextlib.suppress(EnginehouseError):
                        found.append(self.build_of(request.name, installed, node)[0])
        return found

    def _installs(
        self, request: BackendRequest, targets: Sequence[Node], reasons: dict[NodeId, str]
    ) -> list[tuple[Node, Action]]:
        if request.uri:
            return [(node, self._external(request, node)) for node in targets]
        builds, unfit = self._galleries.resolve_each(request.name, targets)
        reasons |= unfit
        return [
            (node, self._install(request, builds[node.id], upgrade=False, keep=_is_kept(builds[node.id], node)))
            for node in targets
            if node.id in builds
        ]

    def _install(
        self, request: BackendRequest, build: Resolved, *, upgrade: bool, keep: bool = False
    ) -> InstallBackend:
        return InstallBackend(
            backend=request.plain_name,
            resolved=self._versions.pinned(build),
            force=request.force,
            upgrade=upgrade,
            keep=keep and not request.force,
            galleries=self._galleries.encoded,
        )

    def _external(self, request: BackendRequest, node: Node) -> InstallBackend:
        build = self._versions.pinned(_external_build(request, node))
        return InstallBackend(backend=request.name, resolved=build, force=request.force, is_external=True)

    def _upgrades(
        self, request: BackendRequest, targets: Sequence[Node], reasons: dict[NodeId, str]
    ) -> list[tuple[Node, Action]]:
        """Upgrade the nodes that have the backend, each to the version of its own build."""
        actions: list[tuple[Node, Action]] = []
        found = [(node, self._held(request, node)) for node in targets]
        holders = [(node, installed) for node, installed in found if installed is not None]
        reasons |= {node.id: f"{request.plain_name} is not installed there" for node, held in found if held is None}
        if not holders:
            self._galleries.known(request.name)  # raises for an unknown name
        for node, installed in holders:
            try:
                build, is_external = self.build_of(request.name, installed, node)
            except Unavailable:
                raise  # temporary; a node left out now would stay at its old version
            except EnginehouseError as error:
                reasons[node.id] = error.message
                continue
            action = self._install(request, build, upgrade=True)
            if node.is_localai:
                # Under the name that it lists, because such a worker stops only the processes of the given name. Its
                # pointers exist already, and an upgrade writes none.
                plain = msgspec.structs.replace(action.resolved, meta="")
                action = msgspec.structs.replace(action, backend=build.directory, resolved=plain)
            if is_external:
                action = InstallBackend(
                    backend=build.directory, resolved=action.resolved, upgrade=True, is_external=True
                )
            actions.append((node, action))
        return actions

    def _held(self, request: BackendRequest, node: Node) -> InstalledBackend | None:
        """Return what a node has installed of a backend.

        LocalAI's workers do not report where their pointers lead, and list no pointer named like the alias of a build.
        For them the build that the galleries have for the machine is looked up.
        """
        held = backends.find(node.report.backends, request.plain_name)
        if held is not None or not node.is_localai:
            return held
        try:
            return backends.find(node.report.backends, self._galleries.resolve(request.name, node).directory)
        except (NotFound, Hopeless):
            return None

    def build_of(self, name: str, installed: InstalledBackend, node: Node) -> tuple[Resolved, bool]:
        """Return the build that replaces an installed one, and whether it is known only by its URI."""
        try:
            build = self._galleries.resolve(name, node)
        except (NotFound, Hopeless):
            if "@" in name or not installed.uri:
                raise
            build = external_build(installed.uri, installed.name, platform=node.platform)
            if parse_uri(installed.uri).kind != "image":
                raise
            return build, True
        return build, False

    def _removals(
        self, request: BackendRequest, targets: Sequence[Node], reasons: dict[NodeId, str]
    ) -> list[tuple[Node, Action]]:
        """Remove from the nodes that report the backend, and from those that may have it unreported (away, or with an
        install under way). Nodes without a build of it are left out.
        """
        plain = request.plain_name
        if all(directory_behind(node.report.backends, plain) is None for node in targets):
            self._galleries.known(request.name)  # raises for an unknown name; success would hide a typing error
        actions: list[tuple[Node, Action]] = []
        for node in targets:
            try:
                actions.append((node, self._removal(request, node)))
            except Hopeless:
                reasons[node.id] = f"{plain} is not installed there, and it has no build for this machine"
        return actions

    def _removal(self, request: BackendRequest, node: Node) -> RemoveBackend:
        plain, listed = request.plain_name, node.report.backends
        directory = directory_behind(listed, plain)
        if directory:
            return RemoveBackend(backend=plain, directory=directory)
        is_pointer = directory is not None  # with an unknown target
        try:
            build = self._galleries.resolve(request.name, node)
        except (NotFound, Hopeless) as error:
            if isinstance(error, NotFound) or is_pointer:
                return RemoveBackend(backend=plain, directory=plain)
            raise
        meant = self._galleries.known(request.name)
        others = {name for entry in meant for name in (entry.name, *entry.capabilities.values())}
        # The alias hides the pointer from the listing. It means this build only if no other build is installed.
        is_alias = build.alias == plain and directory_behind(listed, build.directory) is not None
        is_only = not any(backend.name in others - {plain, build.directory} for backend in listed)
        is_told_by_name = node.is_localai and (is_pointer or (is_alias and is_only))
        return RemoveBackend(backend=plain, directory=build.directory, called=plain if is_told_by_name else "")


def _asked_for(
    connection: Connection, every: Sequence[Node], request: BackendRequest
) -> tuple[list[Node], dict[NodeId, str]]:
    """Return the nodes that a request may target, and the reasons for the others."""
    if request.nodes is not None:
        return _named(connection, request), {}
    found = [node for node in every if node.is_target]
    if not found:
        raise Conflict(
            f"cannot {request.task}: no node is approved; `enginehouse nodes list` shows pending ones",
            code="node_not_approved",
        )
    return found, _why_no_targets([node for node in every if not node.is_target])


def _why_no_targets(others: Sequence[Node]) -> dict[NodeId, str]:
    """Return one reason per node. Of the pending nodes only a few are listed, the last with a count of the rest."""
    reasons = {node.id: _why_no_target(node) for node in others}
    unnamed = [node.id for node in others if not node.approved][MAX_WAITING - 1 :]
    if len(unnamed) > 1:
        reasons[unnamed[0]] = f"{WAITS}, as do {len(unnamed) - 1} more nodes"
        for node_id in unnamed[1:]:
            del reasons[node_id]
    return reasons


def _why_no_target(node: Node) -> str:
    return f"an {node.node_type} node takes no backends" if node.node_type != "backend" else WAITS


def _named(connection: Connection, request: BackendRequest) -> list[Node]:
    if not request.nodes:
        raise Invalid(
            f"cannot {request.task}: the list of nodes is empty; name one or leave it out",
            code="invalid_name",
            param="nodes",
        )
    found = [find_node(connection, name) for name in dict.fromkeys(request.nodes)]
    for node in found:
        if node.node_type != "backend":
            raise Invalid(
                f"cannot {request.task} on {node.name}: {_why_no_target(node)}",
                code="unsupported",
                param="nodes",
            )
        if not node.approved:
            raise Conflict(
                f"cannot {request.task} on {node.name}: it waits for approval; "
                f"approve it with `enginehouse nodes approve {node.name}`",
                code="node_not_approved",
            )
    return list({node.id: node for node in found}.values())


def _external_build(request: BackendRequest, node: Node) -> Resolved:
    return external_build(request.uri, request.name, alias=request.alias, sha256=request.sha256, platform=node.platform)


def _is_kept(build: Resolved, node: Node) -> bool:
    """Whether an install keeps what the node has. Installing an installed backend changes nothing, even if its tag has
    moved: new versions come with upgrades, which keep most of the nodes serving. The worker checks which version it has
    when the command runs, because a report may be old.
    """
    is_there = backends.find(node.report.backends, build.directory) is not None
    return is_there and parse_uri(build.uri).kind == "image"


def _with_before(action: Action, node: Node) -> Action:
    """Add the time of the installation on LocalAI's workers: a later one proves success without a digest."""
    if not isinstance(action, InstallBackend):
        return action
    is_listed = node.is_localai and node.report.mark > 0
    before = installed_at(node.report.backends, action.resolved.directory) if is_listed else None
    return msgspec.structs.replace(action, before=before)


def _nothing_to_do(request: BackendRequest, excluded: Sequence[Excluded]) -> EnginehouseError:
    names: dict[str, list[str]] = {}
    for one in excluded:
        names.setdefault(one.reason, []).append(one.node_name)
    # Each reason once for all its nodes: on a large cluster, repetition would hide the other reasons.
    reasons = "; ".join(f"{', '.join(who)}: {reason}" for reason, who in names.items())
    if any(one.code == UNKNOWN for one in excluded):
        return Unavailable(f"cannot {request.task}: it is unknown which nodes have it ({reasons})", code=UNKNOWN)
    if request.kind == "upgrade":
        return NotFound(f"cannot upgrade {request.name}: no node has it ({reasons})", code="not_found", param="name")
    if request.kind == "rollback":
        return Conflict(f"cannot {request.task}: no node can return to a version ({reasons})", code="conflict")
    return Conflict(f"cannot {request.task}: no node can take it ({reasons})", code="unsupported")
