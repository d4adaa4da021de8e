"""Other words for commands: short forms that are accepted, and the commands meant by words of other programs.

An alias is accepted only where its command exists, so a group without `delete` has no `rm`. A word of another program
is never accepted, because it may mean something else there: it gets a hint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Alias to the commands that it may stand for, best first.
ALIASES: dict[str, tuple[str, ...]] = {
    "ls": ("list",),
    "rm": ("delete", "remove", "revoke"),
    "node": ("nodes",),
    "backend": ("backends",),
    "model": ("models",),
    "replica": ("replicas",),
    "token": ("tokens",),
    "op": ("ops",),
    "operation": ("ops",),
    "operations": ("ops",),
    "context": ("contexts",),
    "galleries": ("gallery",),
}
# Words that people know from docker, kubectl, ollama and systemctl, with what they want here.
ELSEWHERE = {
    "serve": "up",
    "start": "up",
    "stop": "down",
    "pull": "models install",
    "create": "models add",
    "show": "models show",
    "list": "models list",
    "ls": "models list",
    "rm": "models delete",
    "delete": "models delete",
    "get": "nodes list",
    "describe": "nodes show",
    "images": "backends list",
    "install": "backends install",
    "upgrade": "backends upgrade",
    "update": "backends upgrade",
    "chat": "run",
    "drain": "nodes drain",
    "approve": "nodes approve",
    "config": "contexts",
    "info": "status",
    "health": "doctor",
    "jobs": "ops list",
}
MAX_HINTS = 3


def meant(word: str, commands: Iterable[str]) -> str | None:
    """The command that the alias `word` stands for, or None."""
    known = set(commands)
    return next((one for one in ALIASES.get(word, ()) if one in known), None)


def hint(word: str, path: str, commands: Sequence[str]) -> str:
    """A question with the commands of the group at `path` that `word` may mean; "" if there is none."""
    elsewhere = ELSEWHERE.get(word, "") if path == "enginehouse" else ""
    if elsewhere.partition(" ")[0] in commands:
        return f"Did you mean `{path} {elsewhere}`?"
    meant_ones = nearest(word, commands)
    return f"Did you mean {' or '.join(f'`{path} {one}`' for one in meant_ones)}?" if meant_ones else ""


def nearest(word: str, known: Sequence[str]) -> list[str]:
    """What `word` may be a misspelling or the beginning of, nearest first."""
    import difflib

    near = difflib.get_close_matches(word, known, n=MAX_HINTS, cutoff=0.6)
    return near or [one for one in known if len(word) > 1 and one.startswith(word)][:MAX_HINTS]
