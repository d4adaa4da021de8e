"""The settings of the frontend that answers, for people who may look."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.api.whole_frontend import site

from enginehouse import __version__


async def test_people_see_the_settings_and_which_frontend_has_them(tmp_path: Path) -> None:
    before = datetime.now(UTC)
    async with site(tmp_path) as here:
        await here.frontend.keys.step()
        answer = await here.ask("GET", "/api/settings", token=here.tokens["viewer"])
        assert answer.status == 200
        found = answer.json
        assert set(found) == {"settings", "frontend", "database", "data"}
        assert (found["database"], found["data"]) == ("sqlite", str(tmp_path))
        names = {"name", "value", "source", "from", "flag", "variable", "help", "is_secret"}
        assert all(set(one) == names for one in found["settings"])
        assert {one["name"] for one in found["settings"]} >= {"stale", "session", "audit_kept", "database_url"}
        assert set(found["frontend"]) == {"id", "host", "version", "started_at"}
        assert found["frontend"]["version"] == __version__
        started = datetime.fromisoformat(found["frontend"]["started_at"])
        assert before - timedelta(seconds=5) < started < datetime.now(UTC) + timedelta(seconds=5)
        session = await here.ask("GET", "/api/session", token=here.tokens["viewer"])
        assert session.json["frontend"] == found["frontend"]["id"]
        for secret in here.tokens.values():
            assert not secret or secret not in str(found)
