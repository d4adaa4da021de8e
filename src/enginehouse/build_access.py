"""Builds the part of a frontend that knows who may do what and what they did: sessions, and their routes.

Called by `build_frontend` only.
"""

from __future__ import annotations

import platform

from msgspec import Struct

from enginehouse.api.program_logs import ProgramLogRoutes
from enginehouse.api.sessions import SessionRoutes
from enginehouse.api.settings import DescribedFrontend, SettingRoutes
from enginehouse.build_outside import Outside
from enginehouse.frontend.fleet.audit import WRITE_SECONDS as WRITE_AUDIT_SECONDS
from enginehouse.frontend.fleet.audit import AuditLedger
from enginehouse.frontend.fleet.rate_limits import SHARE_SECONDS, RateLimits
from enginehouse.frontend.fleet.sessions import Sessions
from enginehouse.frontend.fleet.tokens import USES_SECONDS, WATCH_SECONDS, Keys
from enginehouse.frontend.fleet.usage import PRUNE_SECONDS, WRITE_SECONDS, UsageLedger
from enginehouse.host.program_log import log_path
from enginehouse.loop import Loop, Wakes
from enginehouse.settings.programs import FrontendSettings
from enginehouse.settings.shown import shown_settings


class AccessParts(Struct, frozen=True, kw_only=True):
    """Tokens and sessions, and what was done and used with them."""

    keys: Keys
    sessions: Sessions
    rate_limits: RateLimits
    usage: UsageLedger
    audit: AuditLedger
    frontend_id: str

    async def prune_step(self) -> None:
        await self.usage.prune_step()
        await self.audit.prune_step()
        await self.sessions.prune_step()

    async def finish(self) -> None:
        """Write what is left when the frontend stops."""
        await self.usage.finish()
        await self.audit.finish()


def make_access(settings: FrontendSettings, outside: Outside, keys: Keys, limits: RateLimits) -> AccessParts:
    store = outside.store
    return AccessParts(
        keys=keys,
        sessions=Sessions(store, keys, settings.session_seconds),
        rate_limits=limits,
        usage=UsageLedger(store),
        audit=AuditLedger(store, keys.now, kept_seconds=settings.audit_kept_seconds),
        frontend_id=outside.owner,
    )


def access_loops(access: AccessParts, every_seconds: float) -> list[Loop]:
    return [
        Loop("keys", access.keys.step, every_seconds),
        Loop("watch-keys", access.keys.watch_step, WATCH_SECONDS),
        Loop("note-token-uses", access.keys.note_uses_step, USES_SECONDS, is_housekeeping=True),
        Loop("rates", access.rate_limits.step, SHARE_SECONDS),
        Loop("write-usage", access.usage.step, WRITE_SECONDS, is_housekeeping=True),
        Loop("write-audit", access.audit.step, WRITE_AUDIT_SECONDS, is_housekeeping=True),
        Loop("prune-access", access.prune_step, PRUNE_SECONDS, is_housekeeping=True),
    ]


def setting_routes(settings: FrontendSettings, access: AccessParts, port: int | None) -> SettingRoutes:
    described = DescribedFrontend(
        frontend_id=access.frontend_id,
        host=platform.node(),
        settings=shown_settings(settings, port=port),
        database="postgresql" if settings.database_url.startswith("postgres") else "sqlite",
        data=str(settings.data),
    )
    return SettingRoutes(described, access.keys)


def program_log_routes(settings: FrontendSettings, wakes: Wakes) -> ProgramLogRoutes:
    files = {"frontend": log_path(settings.data, "frontend"), "nats": settings.data / "logs" / "nats.log"}
    return ProgramLogRoutes(files, (settings.admin_token, settings.join_token), lambda: wakes.is_stopping)


def session_routes(access: AccessParts) -> SessionRoutes:
    return SessionRoutes(access.sessions, access.keys, access.frontend_id)
