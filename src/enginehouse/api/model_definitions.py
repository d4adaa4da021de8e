"""Routes that define models: add, show, change, copy, export, and LocalAI's routes to import and install them.

They check the shape of requests; `frontend.serving.definitions` does the rest. Answers contain names of credentials and
never their values.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from msgspec import Struct, field
from starlette.requests import Request
from starlette.responses import Response

from enginehouse.api.backend_jobs import job_status
from enginehouse.api.requests import (
    BODY_SECONDS,
    MAX_CONTROL_BYTES,
    accepted_response,
    caller_of,
    json_response,
    list_response,
    read_body,
    requester_of,
)
from enginehouse.core.errors import Invalid, Malformed, TooLarge
from enginehouse.core.gallery_entry import Gallery
from enginehouse.core.hidden import without_secrets
from enginehouse.core.ids import OperationId
from enginehouse.core.model_answers import AddModel, CopyModel, ImportedModels, ReplaceModel
from enginehouse.core.model_gallery import GalleryChanges, ModelEntry
from enginehouse.frontend.operations.request import Requests
from enginehouse.frontend.serving.definitions import Definitions
from enginehouse.frontend.serving.installs import ApplyModel, ModelInstalls
from enginehouse.frontend.serving.models import ModelViews
from enginehouse.frontend.watching.board import Board


class GalleryFile(Struct, frozen=True, forbid_unknown_fields=True):
    filename: str
    uri: str
    sha256: str = ""


class ApplyRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """LocalAI's body of `POST /models/apply`."""

    id: str = ""
    url: str = ""
    name: str = ""
    files: tuple[GalleryFile, ...] = ()
    overrides: dict[str, Any] = field(default_factory=dict)
    variant: str = ""


class DefinitionRoutes:
    def __init__(
        self,
        definitions: Definitions,
        installs: ModelInstalls,
        views: ModelViews,
        operations: Requests,
        board: Board,
    ) -> None:
        self._definitions = definitions
        self._installs = installs
        self._views = views
        self._operations = operations
        self._board = board

    async def add(self, request: Request) -> Response:
        asked = await read_body(request, AddModel)
        defined, operation_id = await self._definitions.add(asked, requester_of(request))
        if operation_id:
            return await accepted_response(self._board, operation_id, model=msgspec.to_builtins(defined))
        return json_response(defined, 200 if asked.dry_run else 201)

    async def show(self, request: Request) -> Response:
        defined = await self._definitions.show(_name(request))
        if caller_of(request).role == "viewer":
            defined = msgspec.structs.replace(defined, config=without_secrets(defined.config))
        return json_response(defined)

    async def replace(self, request: Request) -> Response:
        asked = await read_body(request, ReplaceModel)
        return json_response(await self._definitions.change(_name(request), asked, is_patch=False))

    async def patch(self, request: Request) -> Response:
        asked = await read_body(request, ReplaceModel)
        return json_response(await self._definitions.change(_name(request), asked, is_patch=True))

    async def copy(self, request: Request) -> Response:
        asked = await read_body(request, CopyModel)
        return json_response(await self._definitions.copy(_name(request), asked.name), 201)

    async def export(self, request: Request) -> Response:
        written = await self._installs.written(_name(request))
        return Response(written, media_type="application/yaml")

    async def import_all(self, request: Request) -> Response:
        url = request.query_params.get("url", "")
        body = await _raw_body(request)
        if bool(url) == bool(body.strip()):
            raise Invalid("cannot import models: send YAML or JSON as the body, or `?url=`", code="unsupported")
        found = await self._installs.import_url(url) if url else await self._installs.import_text(body)
        return json_response(ImportedModels(models=tuple(found)), 201)

    async def apply(self, request: Request) -> Response:
        asked = await read_body(request, ApplyRequest)
        files = tuple(msgspec.to_builtins(file) for file in asked.files)
        changes = GalleryChanges(name=asked.name, overrides=asked.overrides, files=files)
        wanted = ApplyModel(id=asked.id, url=asked.url, variant=asked.variant, changes=changes)
        defined, operation_id = await self._installs.apply(wanted, requester_of(request))
        return json_response(
            {
                "uuid": operation_id,
                "status": _job_url(request, operation_id),
                "size_bytes": defined.size_bytes,
                "license": defined.license,
                "remarks": defined.remarks,
                "warnings": defined.warnings,
            }
        )

    async def plan(self, request: Request) -> Response:
        asked = await read_body(request, ApplyRequest)
        files = tuple(msgspec.to_builtins(file) for file in asked.files)
        changes = GalleryChanges(name=asked.name, overrides=asked.overrides, files=files)
        return json_response(
            await self._installs.plan(ApplyModel(id=asked.id, url=asked.url, variant=asked.variant, changes=changes))
        )

    async def job(self, request: Request) -> Response:
        return json_response(job_status(await self._board.view(OperationId(request.path_params["id"]))))

    async def delete(self, request: Request) -> Response:
        operation_id = await self._operations.request_model_delete(_name(request), requester_of(request))
        return json_response({"uuid": operation_id, "status": _job_url(request, operation_id)})

    async def available(self, request: Request) -> Response:
        served = {view.name for view in await self._views.every() if view.state != "available"}
        words = request.query_params.get("term", "").lower().split()
        offered = [
            _offered(gallery, entry, is_installed=entry.name in served)
            for gallery, entry in self._installs.offers()
            if all(word in f"{entry.name} {entry.description} {' '.join(entry.tags)}".lower() for word in words)
        ]
        return await list_response(request, offered)

    async def galleries(self, _request: Request) -> Response:
        return json_response(self._installs.states())


def _name(request: Request) -> str:
    return str(request.path_params["name"])


def _job_url(request: Request, operation_id: str) -> str:
    return f"{request.url.scheme}://{request.url.netloc}/models/jobs/{operation_id}"


async def _raw_body(request: Request) -> bytes:
    received = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                received += chunk
                if len(received) > MAX_CONTROL_BYTES:
                    raise TooLarge(f"cannot read the body: it is larger than {MAX_CONTROL_BYTES} bytes")
    except TimeoutError as error:
        raise Malformed(f"cannot read the body: it did not arrive within {BODY_SECONDS:.0f} s", code="slow") from error
    return bytes(received)


def _offered(gallery: Gallery, entry: ModelEntry, *, is_installed: bool) -> dict[str, object]:
    """One entry with LocalAI's keys, omitted where it omits them."""
    described: dict[str, object] = {
        "description": entry.description,
        "license": entry.license,
        "icon": entry.icon,
        "url": entry.url,
        "urls": entry.urls,
        "tags": entry.tags,
        "files": entry.files,
        "overrides": entry.overrides,
        "variants": entry.variants,
        "backend": entry.overrides.get("backend") or entry.backend,
    }
    return {
        "name": entry.name,
        **{key: value for key, value in described.items() if value},
        "gallery": {"url": gallery.url.partition("?")[0], "name": gallery.name},
        "installed": is_installed,
    }
