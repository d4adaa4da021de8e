"""Routes for backends: those installed over all nodes, as the workers reported them, and those the galleries offer."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from enginehouse.api.requests import json_response, list_response
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.node import Node
from enginehouse.core.views import Upgrade
from enginehouse.frontend.fleet.nodes import Nodes
from enginehouse.frontend.galleries import Galleries, Offer
from enginehouse.frontend.operations.upgrades import Upgrades, drift_of


class BackendRoutes:
    def __init__(self, nodes: Nodes, galleries: Galleries, upgrades: Upgrades) -> None:
        self._nodes = nodes
        self._galleries = galleries
        self._upgrades = upgrades

    async def installed(self, _request: Request) -> Response:
        nodes, now = await self._nodes.every()
        upgrades = await self._upgrades.known()
        holders: dict[str, list[tuple[Node, InstalledBackend]]] = {}
        for node in nodes:
            for backend in node.report.backends:
                holders.setdefault(backend.name, []).append((node, backend))
        return json_response(
            [_installed(name, found, upgrades.get(name), now) for name, found in sorted(holders.items())]
        )

    async def available(self, request: Request) -> Response:
        nodes, _ = await self._nodes.every()
        installed = {backend.name for node in nodes for backend in node.report.backends}
        targets = [node for node in nodes if node.is_target]
        urls = {state.name: state.url for state in self._galleries.states()}
        return await list_response(
            request,
            [
                _offered(offer, urls.get(offer.gallery, ""), is_installed=offer.entry.name in installed)
                for offer in self._galleries.offers(targets)
            ],
        )

    async def galleries(self, _request: Request) -> Response:
        return json_response(self._galleries.states())

    async def upgrades(self, _request: Request) -> Response:
        return json_response(await self._upgrades.known())

    async def check_upgrades(self, _request: Request) -> Response:
        return json_response(await self._upgrades.check())


def _offered(offer: Offer, url: str, *, is_installed: bool) -> dict[str, object]:
    """One entry of a gallery: LocalAI's keys, omitted where it omits them, then ours."""
    entry = offer.entry
    described: dict[str, object] = {
        "alias": entry.alias,
        "uri": entry.uri,
        "urls": entry.urls,
        "capabilities": entry.capabilities if entry.is_meta else {},
    }
    return {
        "name": entry.name,
        "description": entry.description,
        "license": entry.license,
        "version": entry.version,
        "tags": entry.tags,
        "gallery": {"url": url, "name": offer.gallery},
        "installed": is_installed,
        **{key: value for key, value in described.items() if value},
        "is_meta": entry.is_meta,
        "is_development": entry.is_development,
        "is_variant": offer.is_variant,
        "fits": offer.fits,
        "stale": offer.is_stale,
    }


def _installed(
    name: str, holders: list[tuple[Node, InstalledBackend]], upgrade: Upgrade | None, now: float
) -> dict[str, object]:
    """One backend over all nodes: LocalAI's keys, then ours."""
    first = holders[0][1]
    described: dict[str, object] = {
        "Name": name,
        "RunFile": "",  # LocalAI's key; it has a path only for backends on the frontend's own disk
        "IsMeta": first.is_meta,
        "IsSystem": first.is_system,
        "Metadata": {
            "name": name,
            "meta_backend_for": first.meta_backend_for,
            "version": first.version,
            "uri": first.uri,
            "digest": first.digest,
            "installed_at": first.installed_at,
            "gallery_url": first.gallery_url,
        },
        "nodes": [_holder(node, backend, now) for node, backend in sorted(holders, key=lambda pair: pair[0].name)],
        "drift": drift_of(holders),
    }
    if upgrade is not None:
        # LocalAI's key is yes or no; ours stands for unknown.
        found = "upgrade_available" if upgrade.is_certain else "upgrade_unknown"
        described |= {found: True, "available_version": upgrade.available_version}
    return described


def _holder(node: Node, backend: InstalledBackend, now: float) -> dict[str, object]:
    return {
        "node_id": node.id,
        "node_name": node.name,
        "node_status": node.status,
        "version": backend.version,
        "digest": backend.digest,
        "uri": backend.uri,
        "installed_at": backend.installed_at,
        "is_broken": backend.is_broken,
        "meta_backend_for": backend.meta_backend_for,
        # The age of this report: a node that is offline may have something else by now.
        "report_age_seconds": round(max(0.0, now - node.last_heartbeat), 1),
    }
