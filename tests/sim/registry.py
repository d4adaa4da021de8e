"""A registry with tags that move once: what each means now, and what it has meant since when."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

from enginehouse.core.artifact import Artifact, Layer

HOST = "registry.example"
ANSWER_SECONDS = 0.005


class SimRegistry:
    def __init__(self, now: Callable[[], float], moves_at: float) -> None:
        self._now = now
        self._moves_at = moves_at

    def digest(self, uri: str) -> str:
        return _digest(uri, is_moved=self._now() >= self._moves_at)

    def meant_since(self, uri: str, since: float) -> set[str]:
        """Every digest that the tag had at some moment from `since` until now."""
        return {self.digest(uri), _digest(uri, is_moved=since >= self._moves_at)}

    async def ask(self, uri: str, platform: str, _sha256: str) -> Artifact:
        await asyncio.sleep(ANSWER_SECONDS)
        layer = Layer(digest=_digest(f"{uri} layer", is_moved=False), size_bytes=1000, compression="gzip")
        return Artifact(uri=uri, digest=self.digest(uri), platform=platform, layers=(layer,))


def _digest(uri: str, *, is_moved: bool) -> str:
    return "sha256:" + hashlib.sha256(f"{uri} {is_moved}".encode()).hexdigest()
