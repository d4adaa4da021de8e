"""A queue that is fair between tokens: first come, first served for each token, and the tokens take turns.

Pure. A token with a thousand entries delays another token by one entry, not by a thousand. The length is counted here
and bounded by the caller, who asks whose entry is to give way.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class FairQueue(Generic[Entry]):
    def __init__(self) -> None:
        # The tokens in the order of their turns, and the entries of each in the order of their arrival.
        self._tokens: OrderedDict[str, OrderedDict[Entry, None]] = OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, token: str, entry: Entry) -> None:
        self._tokens.setdefault(token, OrderedDict())[entry] = None
        self._length += 1

    def remove(self, token: str, entry: Entry) -> bool:
        """Take one entry out; False if it is not there."""
        if entry not in self._tokens.get(token, ()):
            return False
        self._discard(token, entry)
        return True

    def take(self) -> Entry | None:
        """Take the next entry out; None if there is none."""
        for token, entries in self._tokens.items():
            entry = next(iter(entries))
            self._tokens.move_to_end(token)
            self._discard(token, entry)
            return entry
        return None

    def displaced_by(self, token: str) -> Entry | None:
        """The entry that gives way to a new one of `token` in a full queue: the last of the token that has the most.
        None if that is this token itself: then the new one is refused.
        """
        greediest = max(self._tokens, key=lambda one: len(self._tokens[one]), default=token)
        if len(self._tokens.get(greediest, ())) <= len(self._tokens.get(token, ())) + 1:
            return None
        entry = next(reversed(self._tokens[greediest]))
        self._discard(greediest, entry)
        return entry

    def _discard(self, token: str, entry: Entry) -> None:
        entries = self._tokens[token]
        del entries[entry]
        self._length -= 1
        if not entries:
            del self._tokens[token]
