"""Routes for backends: what is installed over all nodes (as the workers reported it), and what the galleries offer."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from enginehouse.api.app import Entry, json_response
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.nodes import Nodes


class BackendRoutes:
    def __init__(self, nodes: Nodes, galleries: Galleries) -> None:
        self._nodes = nodes
        self._galleries = galleries

    def entries(self) -> list[Entry]:
        return [
            Entry(
                method="GET",
                path="/backends",
                role="admin",
                summary="Installed backends, over all nodes.",
                call=self.installed,
            ),
            Entry(
                method="GET",
                path="/backends/available",
                role="admin",
                summary="Backends that a gallery offers.",
                call=self.available,
            ),
            Entry(
                method="GET",
                path="/backends/galleries",
                role="admin",
                summary="The galleries: how fresh each is, and which of its entries cannot be used.",
                call=self.galleries,
            ),
        ]

    async def installed(self, _request: Request) -> Response:
        nodes, _ = await self._nodes.every()
        rows: dict[str, dict[str, object]] = {}
        holders: dict[str, list[dict[str, object]]] = {}
        for node in nodes:
            for backend in node.report.backends:
                rows.setdefault(
                    backend.name,
                    {
                        "Name": backend.name,
                        "IsMeta": backend.is_meta,
                        "IsSystem": backend.is_system,
                        "Metadata": {
                            "name": backend.name,
                            "meta_backend_for": backend.meta_backend_for,
                            "version": backend.version,
                            "uri": backend.uri,
                            "digest": backend.digest,
                            "installed_at": backend.installed_at,
                        },
                    },
                )
                holders.setdefault(backend.name, []).append(
                    {
                        "node_id": node.id,
                        "node_name": node.name,
                        "node_status": node.status,
                        "version": backend.version,
                        "digest": backend.digest,
                        "uri": backend.uri,
                        "installed_at": backend.installed_at,
                        "is_broken": backend.is_broken,
                    }
                )
        return json_response([{**rows[name], "nodes": holders[name]} for name in sorted(rows)])

    async def available(self, _request: Request) -> Response:
        nodes, _ = await self._nodes.every()
        installed = {backend.name for node in nodes for backend in node.report.backends}
        targets = [node for node in nodes if node.is_target]
        return json_response(
            [
                {
                    "name": offer.entry.name,
                    "description": offer.entry.description,
                    "license": offer.entry.license,
                    "version": offer.entry.version,
                    "tags": offer.entry.tags,
                    "gallery": offer.gallery,
                    "is_meta": offer.entry.is_meta,
                    "is_development": offer.entry.is_development,
                    "is_variant": offer.is_variant,
                    "installed": offer.entry.name in installed,
                    "fits": offer.fits,
                    "stale": offer.is_stale,
                }
                for offer in self._galleries.offers(targets)
            ]
        )

    async def galleries(self, _request: Request) -> Response:
        return json_response(self._galleries.states())
