"""What the listing of a LocalAI worker proves. It has no generations, and sometimes no digests.

A digest is the best proof. Without one, a build counts as new if its `installed_at` differs from that of the listing
before the request, or if there was none. Both times are the worker's own, so clocks are not compared. Only if no
earlier listing is known, the worker's time is compared with ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from enginehouse.core.action import InstallBackend
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.intent import Intent


def installed_at(listed: Iterable[InstalledBackend], directory: str) -> str | None:
    """When the worker installed a directory, by its own clock; "" if it has none, None if unknown."""
    for backend in listed:
        if backend.name == directory:
            return backend.installed_at or None
    return ""


def shows_install(backend: InstalledBackend, action: InstallBackend, intent: Intent) -> bool:
    """Whether an entry of a listing is the result of an install or upgrade."""
    wanted = {action.resolved.digest, action.resolved.index_digest} - {""}
    is_same = backend.digest in wanted or action.keep
    if not action.force and (is_same or not (wanted or action.upgrade)):
        return True
    # A digest other than the wanted one is another build, whenever it was installed.
    is_other = bool(wanted and backend.digest) and not is_same
    return not is_other and _came_since(backend, action, intent)


def was_put_in_place(listed: Iterable[InstalledBackend], intent: Intent) -> bool:
    """Whether a listing shows a build that the install's command, or an equal one, has put in place."""
    action = intent.action
    return isinstance(action, InstallBackend) and any(
        backend.name == action.resolved.directory and _came_since(backend, action, intent) for backend in listed
    )


def _came_since(backend: InstalledBackend, action: InstallBackend, intent: Intent) -> bool:
    """Whether the backend was put in place after the command was sent."""
    if not intent.attempt or not backend.installed_at:
        return False
    if action.before is not None:
        return backend.installed_at != action.before
    try:
        at = datetime.fromisoformat(backend.installed_at)
    except ValueError:
        return False
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() > intent.dispatched_at
