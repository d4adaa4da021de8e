"""The OpenAPI document, made from the route table: what is not in the table is not in the document, and the reverse."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from enginehouse import __version__
from enginehouse.api.app import Entry

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code", "request_id"],
            "properties": {key: {"type": "string"} for key in ("message", "type", "code", "param", "request_id")},
        }
    },
}


def document(entries: Sequence[Entry]) -> dict[str, object]:
    bodies = [entry.body for entry in entries if entry.body is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, dict[str, object]] = {}
    for entry in entries:
        described: dict[str, object] = {
            "summary": entry.summary,
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in re.findall(r"{(\w+)", entry.path)
            ],
            "security": [] if entry.role == "public" else [{"bearer": []}],
            "x-role": entry.role,
            "responses": {
                str(entry.status): {"description": "done"},
                "default": {
                    "description": "an error, always in this shape",
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                },
            },
        }
        if entry.body is not None:
            described["requestBody"] = {"content": {"application/json": {"schema": schema_of[entry.body]}}}
        path = re.sub(r"{(\w+):\w+}", r"{\1}", entry.path)
        paths.setdefault(path, {})[entry.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "Enginehouse", "version": __version__},
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "paths": paths,
    }
