"""The OpenAPI document, made from the route table, so that the two always agree."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from enginehouse import __version__
from enginehouse.api.routes import ApiRoute

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


def document(routes: Sequence[ApiRoute]) -> dict[str, object]:
    bodies = [route.body for route in routes if route.body is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, dict[str, object]] = {}
    for route in routes:
        described: dict[str, object] = {
            "summary": route.summary,
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in re.findall(r"{(\w+)", route.path)
            ],
            "security": [] if route.role == "public" else [{"bearer": []}],
            "x-role": route.role,
            "responses": {
                str(route.status): {"description": "done"},
                "default": {
                    "description": "an error, always in this shape",
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                },
            },
        }
        if route.body is not None:
            described["requestBody"] = {"content": {"application/json": {"schema": schema_of[route.body]}}}
        path = re.sub(r"{(\w+):\w+}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "Enginehouse", "version": __version__},
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "paths": paths,
    }
