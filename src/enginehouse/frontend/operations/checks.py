"""Validates a request about a backend, as far as that needs no nodes and no galleries.

Runs before any transaction; raises `Invalid` for the first fault.
"""

from __future__ import annotations

from enginehouse.core.errors import Invalid
from enginehouse.core.installation import check_directory
from enginehouse.core.name import check_name
from enginehouse.core.operation import BackendRequest
from enginehouse.core.reference import parse_uri, shown_uri

MAX_URI = 2048
MAX_PARALLEL = 10_000


def check_backend_request(request: BackendRequest) -> None:
    gallery, at, plain = request.name.rpartition("@")
    check_name(plain, "backend")
    if at:
        check_name(gallery, "gallery")
    if not 0 <= request.max_parallel <= MAX_PARALLEL:
        raise Invalid(
            f"cannot run {request.max_parallel} at once: max_parallel must be a number from 1 to {MAX_PARALLEL}",
            code="invalid_name",
            param="max_parallel",
        )
    if request.kind == "rollback" and request.force:
        raise Invalid(
            f"cannot roll back {request.name} by force: the version before is there, or it is not",
            code="unsupported",
            param="force",
        )
    if request.uri:
        _check_uri(request)
    elif request.alias or request.sha256:
        raise Invalid(
            f"cannot {request.task}: alias and sha256 need a uri",
            code="unsupported",
            param="uri",
        )


def _check_uri(request: BackendRequest) -> None:
    if request.kind != "install" or "@" in request.name:
        raise Invalid(
            f"cannot {request.task} from a URI: only an install under a new name can have one",
            code="unsupported",
            param="uri",
        )
    if len(request.uri) > MAX_URI:
        raise Invalid(f"cannot use a URI of more than {MAX_URI} characters", code="invalid_uri", param="uri")
    check_directory(request.name)
    if request.alias:
        check_name(request.alias, "backend")
    if parse_uri(request.uri).kind in ("directory", "ocifile"):
        raise Invalid(
            f"cannot install from {shown_uri(request.uri)} on a cluster: install files of one machine there, with "
            "`enginehouse local install`",
            code="uri_not_allowed",
            param="uri",
        )
