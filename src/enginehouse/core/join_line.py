"""The line that a person pastes on another machine to make it a node.

It must hold no token: what is pasted ends up in the history of a shell and in the list of processes. Addresses and
names are quoted, because they come from people and from requests.
"""

from __future__ import annotations

import shlex


def join_line(urls: str, *, name: str = "", is_service: bool = False) -> str:
    """`urls`: the address of a frontend, or several with commas; the script comes from the first."""
    words = [urls, *(("--name", name) if name else ()), *(("--service",) if is_service else ())]
    script = f"{urls.split(',')[0]}/join.sh"
    return f"curl -fsS {shlex.quote(script)} | sh -s -- {shlex.join(words)}"
