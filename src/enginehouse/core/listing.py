"""What the listing of one of LocalAI's workers proves: it has no generations, and sometimes no digests.

A digest is the better proof. Where there is none, what counts is that the build was put in place since: its
`installed_at` is another than that of the listing before the request, or there was nothing then. Both times are the
worker's own, so no clock is compared with another. Only where no listing from before is known, its time is compared
with ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from enginehouse.core.action import InstallBackend
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.intent import Intent


def installed_at(listed: Iterable[InstalledBackend], directory: str) -> str | None:
    """When a worker has put a directory in place, in its own words; "" where it has none, None where nobody knows."""
    for backend in listed:
        if backend.name == directory:
            return backend.installed_at or None
    return ""


def shows_install(backend: InstalledBackend, action: InstallBackend, intent: Intent) -> bool:
    """Whether an entry of a listing is what an install or an upgrade was to bring."""
    wanted = {action.resolved.digest, action.resolved.index_digest} - {""}
    is_same = backend.digest in wanted or action.keep
    if not action.force and (is_same or not (wanted or action.upgrade)):
        return True
    # Another digest than the wanted one is something else, whenever it came.
    is_other = bool(wanted and backend.digest) and not is_same
    return not is_other and _came_since(backend, action, intent)


def has_come(listed: Iterable[InstalledBackend], intent: Intent) -> bool:
    """Whether a listing shows something that the command of an install has put in place, or an equal one."""
    action = intent.action
    return isinstance(action, InstallBackend) and any(
        backend.name == action.resolved.directory and _came_since(backend, action, intent) for backend in listed
    )


def _came_since(backend: InstalledBackend, action: InstallBackend, intent: Intent) -> bool:
    """Whether it was put in place after the command was sent."""
    if not intent.attempt or not backend.installed_at:
        return False
    if action.before is not None:
        return backend.installed_at != action.before
    try:
        at = datetime.fromisoformat(backend.installed_at)
    except ValueError:
        return False
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() > intent.dispatched_at
