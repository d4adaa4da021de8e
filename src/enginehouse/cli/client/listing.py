"""Lists that arrive in pages, and the node that a list is narrowed to."""

from __future__ import annotations

from enginehouse.cli.client.connect import FrontendApi, segment
from enginehouse.core.errors import NotFound
from enginehouse.link.client import REQUEST_SECONDS

PAGE = 500  # nodes per request


def every_node(frontend: FrontendApi, timeout_seconds: float = REQUEST_SECONDS) -> object:
    """All nodes, page by page: none of the answers is long, however many nodes there are."""
    found: dict[object, object] = {}
    path = first = f"/api/nodes?limit={PAGE}"
    while True:
        try:
            page = frontend.get(path, timeout_seconds=timeout_seconds)
        except NotFound:
            if path == first:
                raise
            return frontend.get("/api/nodes")  # the last node of the page before was removed
        if not isinstance(page, list) or not all(isinstance(one, dict) for one in page):
            return page
        known = len(found)
        found |= {one.get("id"): one for one in page}
        # An older frontend knows no pages, and answers with all nodes each time.
        if len(page) != PAGE or len(found) == known:
            return list(found.values())
        path = f"{first}&after={segment(str(page[-1].get('id')))}"


def must_exist(frontend: FrontendApi, node: str) -> None:
    """Let the server refuse a name or id that no node has: an empty list would look like a node without anything."""
    frontend.get(f"/api/nodes/{segment(node)}")
