"""Which nodes a request about a backend goes to, what each is to do, and why the others are left out.

Decided once, from one look at the nodes and the galleries, and shown: being away is no reason to be left out, a request
waits; waiting for approval, being of another kind, having no build or not having what is to be upgraded are.
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
from enginehouse.core.installation import directory_behind
from enginehouse.core.intent import Intent
from enginehouse.core.listing import installed_at
from enginehouse.core.node import MAX_WAITING, Node
from enginehouse.core.operation import BackendRequest, Excluded
from enginehouse.core.reference import parse_uri
from enginehouse.frontend.fleet.nodes import find_node
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.operations.versions import Versions
from enginehouse.store import intents, nodes
from enginehouse.store.db import Connection

Unknown = Collection[str]  # the ids of nodes
# Refreshes what is known of these nodes, or of all; returns the ids of nodes whose state is unknown.
Freshen = Callable[[Collection[str] | None], Awaitable[Collection[str]]]
WAITS = "it waits for approval"
UNKNOWN = "unknown"  # the code of a node that may have been left out by mistake
UNKNOWN_REASON = "its worker did not say what it has; ask again when it answers"


async def as_known(_nodes: Collection[str] | None) -> Collection[str]:
    """Uses the last reports: for a cluster without workers that have to be polled."""
    return ()


class TargetChoice(Struct, frozen=True):
    """What a request comes to."""

    actions: list[tuple[Node, Action]]
    excluded: list[Excluded]
    fleet: int  # approved nodes that take backends


class Targets:
    """Chooses. Everything is read from the connection and from the catalogue as it is now."""

    def __init__(self, galleries: Galleries, versions: Versions) -> None:
        self._galleries = galleries
        self._versions = versions

    def choose(self, connection: Connection, request: BackendRequest, unknown: Unknown = frozenset()) -> TargetChoice:
        """`unknown` are nodes of which nobody knows now what they have (`Listings.freshen`)."""
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
                case _:
                    actions = self._installs(request, targets, reasons)
        except NotFound:
            actions = []
            reasons |= {node.id: UNKNOWN_REASON for node in targets if node.id in unknown}
            if request.kind == "install" or not reasons.keys() & set(unknown):
                raise
        is_sure = request.kind == "install"  # what a node has decides nothing then
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
        """What is open, or was done since their reports, about what the request may mean on these nodes."""
        plain = request.plain_name
        directories = {plain, *(directory_behind(node.report.backends, plain) or plain for node in targets)}
        with contextlib.suppress(EnginehouseError):
            builds, _ = self._galleries.resolve_each(request.name, targets)
            directories |= {build.directory for build in builds.values()}
        changes = intents.changing(connection, targets, (f"backend:{one}" for one in directories))
        removals = [one for one in changes if isinstance(one.action, RemoveBackend)]
        if request.kind == "delete":
            # What is being deleted already, or was a moment ago, can be asked to be deleted once more.
            changes = [one for one in changes if one not in removals]
        elif request.kind == "upgrade":
            # A delete that is under way has not happened: the newer request replaces it.
            changes = [one for one in changes if one not in removals or not one.is_open]
        return changes

    def again(self, connection: Connection, actions: Sequence[tuple[str, Action]]) -> list[tuple[str, Action]]:
        """The same actions once more, renewed: a tag may have moved, and the node may have what it lacked."""
        here = {node_id: nodes.get(connection, node_id) for node_id, _ in actions}
        subjects = {subject_of(action) for _, action in actions}
        found = [node for node in here.values() if node is not None]
        after = {node.id: node for node in nodes_after(found, intents.changing(connection, found, subjects))}
        return [(node_id, self._renewed(action, after.get(node_id))) for node_id, action in actions]

    def _renewed(self, action: Action, node: Node | None) -> Action:
        if not isinstance(action, InstallBackend) or node is None:
            return action
        is_plain = not (action.force or action.upgrade or action.is_external)
        renewed = msgspec.structs.replace(
            action,
            resolved=self._versions.renewed(action.resolved),
            keep=is_plain and _is_kept(action.resolved, node),
        )
        return _with_before(renewed, node)

    def builds(self, connection: Connection, request: BackendRequest, unknown: Unknown = frozenset()) -> list[Resolved]:
        """The builds that a request comes to, for looking up their versions; none where it will be refused anyway."""
        try:
            chosen = self.choose(connection, request, unknown)
        except EnginehouseError:
            return []
        found = [action.resolved for _, action in chosen.actions if isinstance(action, InstallBackend)]
        return [self._versions.unpinned(build) for build in found]

    def _installs(
        self, request: BackendRequest, targets: Sequence[Node], reasons: dict[str, str]
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
        build = external_build(
            request.uri, request.name, alias=request.alias, sha256=request.sha256, platform=node.platform
        )
        return InstallBackend(
            backend=request.name, resolved=self._versions.pinned(build), force=request.force, is_external=True
        )

    def _upgrades(
        self, request: BackendRequest, targets: Sequence[Node], reasons: dict[str, str]
    ) -> list[tuple[Node, Action]]:
        """To the nodes that have it, each to the version of its own build."""
        actions: list[tuple[Node, Action]] = []
        found = [(node, self._held(request, node)) for node in targets]
        holders = [(node, installed) for node, installed in found if installed is not None]
        reasons |= {node.id: f"{request.plain_name} is not installed there" for node, held in found if held is None}
        if not holders:
            self._galleries.known(request.name)  # a name that nobody knows is a mistake
        for node, installed in holders:
            try:
                build, is_external = self.build_of(request.name, installed, node)
            except Unavailable:
                raise  # in a moment it may be known; left out now, this node would stay behind
            except EnginehouseError as error:
                reasons[node.id] = error.message
                continue
            action = self._install(request, build, upgrade=True)
            if node.is_localai:
                # Under the name that it lists: such a worker stops the processes of the very name that it is told.
                # It has its pointers already, and an upgrade writes none.
                plain = msgspec.structs.replace(action.resolved, meta="")
                action = msgspec.structs.replace(action, backend=build.directory, resolved=plain)
            if is_external:
                action = InstallBackend(
                    backend=build.directory, resolved=action.resolved, upgrade=True, is_external=True
                )
            actions.append((node, action))
        return actions

    def _held(self, request: BackendRequest, node: Node) -> InstalledBackend | None:
        """What a node has of a backend. One of LocalAI's does not tell where its pointers lead, and lists none that is
        called as the alias of its build: there it is the build that the galleries have for that machine.
        """
        held = backends.find(node.report.backends, request.plain_name)
        if held is not None or not node.is_localai:
            return held
        try:
            return backends.find(node.report.backends, self._galleries.resolve(request.name, node).directory)
        except (NotFound, Hopeless):
            return None

    def build_of(self, name: str, installed: InstalledBackend, node: Node) -> tuple[Resolved, bool]:
        """The build that replaces what is installed, and whether it is known only by the address it came from."""
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
        self, request: BackendRequest, targets: Sequence[Node], reasons: dict[str, str]
    ) -> list[tuple[Node, Action]]:
        """To the nodes that report the backend and to those that may have it without having reported it yet (away, or
        an install under way); not to those for which there is no build of it."""
        plain = request.plain_name
        if all(directory_behind(node.report.backends, plain) is None for node in targets):
            self._galleries.known(request.name)  # a name that nobody knows is a mistake, not an empty success
        actions: list[tuple[Node, Action]] = []
        for node in targets:
            try:
                actions.append((node, self._removal(request, node)))
            except Hopeless:
                reasons[node.id] = f"{plain} is not installed there, and there is no build of it for this machine"
        return actions

    def _removal(self, request: BackendRequest, node: Node) -> RemoveBackend:
        plain, listed = request.plain_name, node.report.backends
        directory = directory_behind(listed, plain)
        if directory:
            return RemoveBackend(backend=plain, directory=directory)
        is_pointer = directory is not None  # which leads nobody knows where
        try:
            build = self._galleries.resolve(request.name, node)
        except (NotFound, Hopeless) as error:
            if isinstance(error, NotFound) or is_pointer:
                return RemoveBackend(backend=plain, directory=plain)
            raise
        meant = self._galleries.known(request.name)
        others = {name for entry in meant for name in (entry.name, *entry.capabilities.values())}
        # Its alias, which hides the pointer from the listing, means this build alone where no other one is there.
        is_alias = build.alias == plain and directory_behind(listed, build.directory) is not None
        is_only = not any(backend.name in others - {plain, build.directory} for backend in listed)
        is_told_by_name = node.is_localai and (is_pointer or (is_alias and is_only))
        return RemoveBackend(backend=plain, directory=build.directory, called=plain if is_told_by_name else "")


def _asked_for(
    connection: Connection, every: Sequence[Node], request: BackendRequest
) -> tuple[list[Node], dict[str, str]]:
    """The nodes that a request may go to, and why it does not go to the others that were meant."""
    if request.nodes is not None:
        return _named(connection, request), {}
    found = [node for node in every if node.is_target]
    if not found:
        raise Conflict(
            f"cannot {request.kind} {request.name}: no node is approved; see `enginehouse nodes list`",
            code="node_not_approved",
        )
    return found, _why_no_targets([node for node in every if not node.is_target])


def _why_no_targets(others: Sequence[Node]) -> dict[str, str]:
    """One reason for each; of those that wait for approval, a few."""
    reasons = {node.id: _why_no_target(node) for node in others}
    unnamed = [node.id for node in others if not node.approved][MAX_WAITING - 1 :]
    if len(unnamed) > 1:
        reasons[unnamed[0]] = f"{WAITS}, and {len(unnamed) - 1} more machines do"
        for node_id in unnamed[1:]:
            del reasons[node_id]
    return reasons


def _why_no_target(node: Node) -> str:
    return f"an {node.node_type} node takes no backends" if node.node_type != "backend" else WAITS


def _named(connection: Connection, request: BackendRequest) -> list[Node]:
    if not request.nodes:
        raise Invalid(
            f"cannot {request.kind} {request.name}: the list of nodes is empty", code="invalid_name", param="nodes"
        )
    found = [find_node(connection, name) for name in dict.fromkeys(request.nodes)]
    for node in found:
        if node.node_type != "backend":
            raise Invalid(
                f"cannot {request.kind} {request.name} on {node.name}: {_why_no_target(node)}",
                code="unsupported",
                param="nodes",
            )
        if not node.approved:
            raise Conflict(
                f"cannot {request.kind} {request.name} on {node.name}: it waits for approval; "
                f"approve it with `enginehouse nodes approve {node.name}`",
                code="node_not_approved",
            )
    return list({node.id: node for node in found}.values())


def _is_kept(build: Resolved, node: Node) -> bool:
    """To install what is there changes nothing, whatever its tag has come to mean: new versions come by upgrades, which
    leave most of a fleet serving. Which version that is the worker finds when its turn has come; a report may be old.
    """
    is_there = backends.find(node.report.backends, build.directory) is not None
    return is_there and parse_uri(build.uri).kind == "image"


def _with_before(action: Action, node: Node) -> Action:
    """For a worker of LocalAI's: with what tells whether it has done it since, where its listing has no digest."""
    if not isinstance(action, InstallBackend):
        return action
    is_listed = node.is_localai and node.report.mark > 0
    before = installed_at(node.report.backends, action.resolved.directory) if is_listed else None
    return msgspec.structs.replace(action, before=before)


def _nothing_to_do(request: BackendRequest, excluded: Sequence[Excluded]) -> EnginehouseError:
    names: dict[str, list[str]] = {}
    for one in excluded:
        names.setdefault(one.reason, []).append(one.node_name)
    # Once for all nodes that have it: on a large fleet the same sentence a hundred times hides what else there is.
    reasons = "; ".join(f"{', '.join(who)}: {reason}" for reason, who in names.items())
    if any(one.code == UNKNOWN for one in excluded):
        return Unavailable(f"cannot {request.kind} {request.name}: nobody knows who has it ({reasons})", code=UNKNOWN)
    if request.kind == "upgrade":
        return NotFound(f"cannot upgrade {request.name}: no node has it ({reasons})", code="not_found", param="name")
    return Conflict(f"cannot {request.kind} {request.name}: no node can take it ({reasons})", code="unsupported")
