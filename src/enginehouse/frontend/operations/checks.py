"""Everything that can be said of a request about a backend without looking at nodes."""

from __future__ import annotations

from enginehouse.core.errors import Invalid
from enginehouse.core.installation import check_directory
from enginehouse.core.name import check_name
from enginehouse.core.reference import parse_uri, shown_uri
from enginehouse.frontend.operations.targets import BackendWish

MAX_URI = 2048
MAX_PARALLEL = 10_000


def check_wish(wish: BackendWish) -> None:
    gallery, at, plain = wish.name.rpartition("@")
    check_name(plain, "backend")
    if at:
        check_name(gallery, "gallery")
    if not 0 <= wish.max_parallel <= MAX_PARALLEL:
        raise Invalid(
            f"cannot run {wish.max_parallel} at once: max_parallel is a number from 1 to {MAX_PARALLEL}",
            code="invalid_name",
            param="max_parallel",
        )
    if wish.uri:
        _check_uri(wish)
    elif wish.alias or wish.sha256:
        raise Invalid(
            f"cannot {wish.kind} {wish.name}: an alias and a sha256 are for an install from a URI",
            code="unsupported",
            param="uri",
        )


def _check_uri(wish: BackendWish) -> None:
    if wish.kind != "install" or "@" in wish.name:
        raise Invalid(
            f"cannot {wish.kind} {wish.name} from a URI: only an install under a name of your own takes one",
            code="unsupported",
            param="uri",
        )
    if len(wish.uri) > MAX_URI:
        raise Invalid(f"cannot use a URI of more than {MAX_URI} characters", code="invalid_uri", param="uri")
    check_directory(wish.name)
    if wish.alias:
        check_name(wish.alias, "backend")
    if parse_uri(wish.uri).kind in ("directory", "ocifile"):
        raise Invalid(
            f"cannot install from {shown_uri(wish.uri)} on a fleet: files of one machine are installed there with "
            "`enginehouse local install`",
            code="uri_not_allowed",
            param="uri",
        )
