"""Builds that no gallery names: an image, archive, directory or package, given by its URI.

One function for every place that accepts a URI, so that equal URIs give equal builds.
"""

from __future__ import annotations

from enginehouse.core.backend import Resolved, package_digest
from enginehouse.core.installation import check_directory
from enginehouse.core.reference import parse_uri


def external_build(uri: str, name: str, *, alias: str = "", sha256: str = "", platform: str = "") -> Resolved:
    """The build at `uri`, installed as `name`. A package has its digest at once; a tag is resolved later."""
    digest = package_digest(uri, (), "", "") if parse_uri(uri).kind == "package" else ""
    return Resolved(
        directory=check_directory(name), uri=uri, digest=digest, alias=alias, sha256=sha256, platform=platform
    )
