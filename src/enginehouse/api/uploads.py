"""Routes for uploads: parts of files from people, whole files and ranges of them to workers.

`HEAD` says how far an upload is, `PUT` appends the part that its Content-Range names, `GET` answers ranges.
"""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from enginehouse.api.requests import json_response
from enginehouse.core.errors import Malformed
from enginehouse.frontend.serving.uploads import UploadRange, Uploads

_CONTENT_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")

_RANGE = re.compile(r"bytes=\d{1,15}-\d{0,15}")


class UploadRoutes:
    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads

    async def state(self, request: Request) -> Response:
        state = await self._uploads.state(str(request.path_params["sha256"]))
        headers = {"upload-offset": str(state.offset_bytes), "upload-complete": "?1" if state.is_complete else "?0"}
        return Response(b"", 200, headers)

    async def write(self, request: Request) -> Response:
        part = _range_of(request)
        state = await self._uploads.write(str(request.path_params["sha256"]), part, request.stream())
        body = {"offset": state.offset_bytes, "complete": state.is_complete}
        return json_response(body, 201 if state.is_complete else 200)

    async def read(self, request: Request) -> Response:
        path = await self._uploads.path(str(request.path_params["sha256"]))
        wanted = request.headers.get("range", "")
        if wanted and not _RANGE.fullmatch(wanted):
            raise Malformed(
                "cannot read this range: write `Range: bytes=START-[END]`", code="unsupported", param="Range"
            )
        return FileResponse(path, media_type="application/octet-stream")


def _range_of(request: Request) -> UploadRange:
    found = _CONTENT_RANGE.fullmatch(request.headers.get("content-range", ""))
    if found is None:
        raise Malformed(
            "cannot read the part: send `Content-Range: bytes START-END/TOTAL`",
            code="unsupported",
            param="Content-Range",
        )
    start, last, total = (int(number) for number in found.groups())
    if not start <= last < total:
        raise Malformed("cannot read the part: its Content-Range makes no sense", code="unsupported")
    return UploadRange(start, last + 1, total)
