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
        return json_response(
            [
                {
                    "name": entry.name,
                    "description": entry.description,
                    "license": entry.license,
                    "version": entry.version,
                    "tags": entry.tags,
                    "gallery": gallery.name,
                    "is_meta": entry.is_meta,
                    "installed": entry.name in installed,
                }
                for gallery, entry in self._galleries.entries()
            ]
        )
