"""What a test tells a stand-in worker, and what it tells the test: two files in its data directory.

`control.json` is read before every request, so a fault begins and ends when the test says so. `requests.jsonl` has a
line per HTTP request and per message, with everything that a frontend sent.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Control:
    def __init__(self, data: Path) -> None:
        self._path = data / "control.json"
        self._log = data / "requests.jsonl"

    # The test's side ------------------------------------------------------------------------------

    def set(self, **faults: object) -> None:
        """These faults and no others from now on."""
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps(faults))
        temporary.replace(self._path)

    def requests(self, kind: str = "") -> list[dict[str, Any]]:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        found = [json.loads(line) for line in lines]
        return [one for one in found if not kind or one["kind"] == kind]

    def forget(self) -> None:
        self._log.unlink(missing_ok=True)

    # The worker's side ----------------------------------------------------------------------------

    def get(self, name: str, otherwise: Any = None) -> Any:
        try:
            return json.loads(self._path.read_text()).get(name, otherwise)
        except FileNotFoundError:
            return otherwise

    def note(self, kind: str, **fields: object) -> None:
        with self._log.open("a") as log:
            log.write(json.dumps({"kind": kind, **fields}) + "\n")
