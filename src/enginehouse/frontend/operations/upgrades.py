"""Finds available upgrades: for each node and build, compares the installed version with the gallery's.

Computed from the last reports and the last answers of registries, so the result is empty once every node has reported
the new version. Drift means that a node has another version than most; it is shown, but is no upgrade by itself. If a
worker records no digest (LocalAI's, for some images), its version is unknown: the node is shown as unknown, upgradable
and drifted until it is known to have the same version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import UNSET, Struct

from enginehouse.core.backend import InstalledBackend, Resolved, is_version
from enginehouse.core.errors import EnginehouseError
from enginehouse.core.node import Node
from enginehouse.core.views import Drift, NodeUpgrade, Upgrade
from enginehouse.frontend.operations.targets import Freshen, Targets, use_last_reports
from enginehouse.frontend.operations.versions import Versions
from enginehouse.store import nodes
from enginehouse.store.db import Store

FIRST_SECONDS = 10.0  # after a start; the same as in LocalAI
CHECK_SECONDS = 6 * 3600.0  # a check queries a registry for every installed build


class _Installed(Struct, frozen=True):
    node: Node
    backend: InstalledBackend
    build: Resolved | None


class Upgrades:
    def __init__(self, store: Store, targets: Targets, versions: Versions, freshen: Freshen = use_last_reports) -> None:
        self._store = store
        self._targets = targets
        self._versions = versions
        self._freshen = freshen

    async def step(self) -> None:
        """Query the registries; the answers are kept in `Versions`."""
        await self.check()

    async def check(self) -> dict[str, Upgrade]:
        """Poll workers and query registries, then return the upgrades."""
        await self._freshen(None)
        installed = await self._installed()
        await self._versions.resolve([one.build for one in installed if one.build is not None])
        return self._upgrades(installed)

    async def known(self) -> dict[str, Upgrade]:
        """Return the upgrades by the answers known so far."""
        return self._upgrades(await self._installed())

    async def _installed(self) -> list[_Installed]:
        every = await self._store.read(nodes.every)
        return [
            _Installed(node, backend, self._build(node, backend))
            for node in every
            if node.is_target
            for backend in node.report.backends
            if not backend.is_meta and not backend.is_system and not backend.is_broken
        ]

    def _build(self, node: Node, backend: InstalledBackend) -> Resolved | None:
        try:
            return self._targets.build_of(backend.name, backend, node)[0]
        except EnginehouseError:
            return None  # in no gallery, or in one that is not loaded yet: nothing to upgrade to

    def _upgrades(self, installed: Sequence[_Installed]) -> dict[str, Upgrade]:
        found: dict[str, Upgrade] = {}
        for one in installed:
            available = self._available(one)
            if available is None:
                continue
            backend = one.backend
            row = NodeUpgrade(
                node_id=one.node.id,
                node_name=one.node.name,
                installed_version=backend.version,
                installed_digest=backend.digest,
                available_version=available.version,
                available_digest=available.digest,
                unknown=_is_unknown(backend, available) or UNSET,
            )
            known = found.get(backend.name)
            if known is not None:
                known.nodes.append(row)
                continue
            others = drift_of([(two.node, two.backend) for two in installed if two.backend.name == backend.name])
            found[backend.name] = Upgrade(
                backend_name=backend.name,
                installed_version=backend.version,
                available_version=available.version,
                installed_digest=backend.digest or UNSET,
                available_digest=available.digest or UNSET,
                node_drift=others or UNSET,
                nodes=[row],
            )
        return dict(sorted(found.items()))

    def _available(self, one: _Installed) -> Resolved | None:
        """Return the build of another version than the installed one; None if it is the same or unknown."""
        if one.build is None:
            return None
        build = self._versions.pinned(one.build)
        if build.digest and one.backend.digest:
            return None if is_version(one.backend.digest, build) else build
        if build.digest:
            return build  # the installed version is unknown
        # The gallery's digest is unknown: only different version names prove a difference.
        return build if _is_other_name(build.version, one.backend.version) else None


def _is_other_name(first: str, second: str) -> bool:
    return bool(first and second) and first != second


def _is_unknown(backend: InstalledBackend, available: Resolved) -> bool:
    return not backend.digest and not _is_other_name(backend.version, available.version)


def drift_of(holders: Sequence[tuple[Node, InstalledBackend]]) -> list[Drift]:
    """Return the nodes whose version differs from the most common one, or is unknown. Of two equally common versions
    the first in sort order is used. A pointer has no version of its own.
    """
    counts = Counter((backend.version, backend.digest) for _, backend in holders)
    if len(holders) < 2:
        return []
    known = {version: count for version, count in counts.items() if version[1]} or counts
    usual = min(known, key=lambda version: (-known[version], version))
    drift: list[Drift] = []
    for node, backend in sorted(holders, key=lambda pair: pair[0].name):
        # Without a digest, only a different version name could tell it from the usual version.
        is_unknown = not (backend.digest or backend.is_meta or _is_other_name(backend.version, usual[0]))
        if is_unknown or (backend.version, backend.digest) != usual:
            row = Drift(
                node_id=node.id,
                node_name=node.name,
                version=backend.version or UNSET,
                digest=backend.digest or UNSET,
                unknown=is_unknown or UNSET,
            )
            drift.append(row)
    return drift
