"""The route for the settings of the frontend that answers. They are read-only: settings change with a restart."""

from __future__ import annotations

import asyncio

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from enginehouse import __version__
from enginehouse.api.requests import json_response
from enginehouse.core.views import FrontendView, SettingsView, SettingView
from enginehouse.frontend.fleet.tokens import Keys
from enginehouse.frontend.watching.views import render_time


class DescribedFrontend(Struct, frozen=True, kw_only=True):
    """What does not change while a frontend runs."""

    frontend_id: str
    host: str
    settings: list[SettingView]
    database: str
    data: str


class SettingRoutes:
    def __init__(self, described: DescribedFrontend, keys: Keys) -> None:
        self._described = described
        self._keys = keys
        self._started = asyncio.get_running_loop().time()

    async def every(self, _request: Request) -> Response:
        known = self._described
        started = self._keys.now() - (asyncio.get_running_loop().time() - self._started)
        return json_response(
            SettingsView(
                settings=known.settings,
                frontend=FrontendView(
                    id=known.frontend_id, host=known.host, version=__version__, started_at=render_time(started)
                ),
                database=known.database,
                data=known.data,
            )
        )
