"""How those who decide by what nodes have get it as it is now; see `Listings.freshen`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

# Of these nodes, or of all; the ids of those of which nobody knows.
Freshen = Callable[[Collection[str] | None], Awaitable[Collection[str]]]


async def as_known(_nodes: Collection[str] | None) -> Collection[str]:
    """What was reported last will do: for a cluster without workers that must be asked."""
    return ()
