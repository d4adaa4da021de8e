"""Prefix affinity: requests that begin alike go to the replica that has their beginning in its cache.

Pure: the hash, the time and the counts are arguments. A prompt is cut into windows, and the hash of a window covers all
windows before it, so one table of hashes is the tree of all prompts: an entry has its ancestors in the table too. The
rules and their numbers are LocalAI's. An operation costs as much as a prompt has windows, however large the table is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence

import msgspec
from msgspec import Struct

WINDOW_BYTES = 256
MAX_WINDOWS = 64
MAX_TEXT_BYTES = WINDOW_BYTES * MAX_WINDOWS
TTL_SECONDS = 300.0
HALF_LIFE_SECONDS = 120.0  # of the weight of an entry
DISTURBED_SECONDS = 60.0  # how long a request that lost its replica is a reason for another replica
# Entries of all models: some 26 MB. The oldest give way, long before a client could fill the memory with prompts.
MAX_ENTRIES = 131_072
# A longer request is not read for its beginning: it was read once already, and a second time would delay others.
MAX_REQUEST_BYTES = 1024 * 1024
_REMOVED_AT_ONCE = 4 * MAX_WINDOWS  # expired entries per call: more than one prompt adds, and soon done
_REBASE = 500.0  # half-lives after which sums of weights are scaled down; floats end at 1,023

HashWindow = Callable[[bytes], int]


class _Part(Struct):
    text: str | None = None


class _Turn(Struct):
    role: str | None = None
    content: str | list[_Part] | None = None


class _Prompted(Struct):
    """The fields of a request that have text. Messages are decoded one by one, only as many as are needed."""

    messages: list[msgspec.Raw] | None = None
    prompt: str | list[str] | None = None


_PROMPTED = msgspec.json.Decoder(_Prompted)
_TURN = msgspec.json.Decoder(_Turn)


def prompt_source(body: bytes) -> bytes:
    """The beginning of the text of a request: role and content of each message, or the prompt of a completion; empty if
    it has none. The prompt that an engine makes of it is not known before an engine is chosen.
    """
    if len(body) > MAX_REQUEST_BYTES:
        return b""
    try:
        found = _PROMPTED.decode(body)
        if not found.messages:
            prompt = found.prompt[0] if isinstance(found.prompt, list) and found.prompt else found.prompt
            return prompt[:MAX_TEXT_BYTES].encode()[:MAX_TEXT_BYTES] if isinstance(prompt, str) else b""
        text = bytearray()
        for raw in found.messages:
            text += _turn_text(_TURN.decode(raw))
            if len(text) >= MAX_TEXT_BYTES:
                break
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return b""  # other routes have other bodies, and what is malformed is refused by the engine
    return bytes(text[:MAX_TEXT_BYTES])


def _turn_text(turn: _Turn) -> bytes:
    content = turn.content or ""
    if not isinstance(content, str):
        content = "".join(part.text or "" for part in content)
    return f"{turn.role or ''}\n{content[:MAX_TEXT_BYTES]}\n".encode()


def hash_chain(model: str, text: bytes, hash_window: HashWindow) -> tuple[int, ...]:
    """One hash per window of the text, each covering all windows before it; empty without text."""
    chain = []
    last = hash_window(model.encode())
    for start in range(0, min(len(text), MAX_TEXT_BYTES), WINDOW_BYTES):
        last = hash_window(last.to_bytes(8, "little") + text[start : start + WINDOW_BYTES])
        chain.append(last)
    return tuple(chain)


class PrefixIndex:
    """Which replica was last seen with which beginning of a prompt."""

    def __init__(self, ttl_seconds: float = TTL_SECONDS, max_entries: int = MAX_ENTRIES) -> None:
        self._ttl_seconds = ttl_seconds
        self._max_entries = max_entries
        # (replica, last seen) by hash, the least recently seen first. All entries of one observation share a tuple.
        self._entries: OrderedDict[int, tuple[str, float]] = OrderedDict()
        # Per replica the sum of 2^((seen - landmark) / half-life) over its entries, and their number. Such a sum needs
        # no update as time passes: its present value is the sum divided by the same power of the present.
        self._sums: dict[str, list[float]] = {}
        self._landmark: float | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def observe(self, chain: Sequence[int], replica: str, now: float) -> bool:
        """Note that a replica has this prompt; the last one wins. Returns whether anything about it is new."""
        if not chain:
            return False
        self.sweep(now, _REMOVED_AT_ONCE)
        entries, mark = self._entries, (replica, now)
        is_new, last, number = False, mark, 0
        # The last window first: of one observation it is the oldest entry, so no entry outlives its ancestors.
        for one in reversed(chain):
            before = entries.get(one)
            entries[one] = mark
            if before is None:
                is_new = True
                continue
            entries.move_to_end(one)
            if before is not last:  # neighbours mostly come from one observation, and are counted together
                self._add(last, -number)
                is_new = is_new or before[0] != replica
                last, number = before, 0
            number += 1
        self._add(last, -number)
        self._add(mark, len(chain))
        while len(entries) > self._max_entries:
            self._add(entries.popitem(last=False)[1], -1)
        return is_new

    def match(self, chain: Sequence[int], known: Container[str], now: float) -> tuple[str, int]:
        """The known replica with the longest beginning of this prompt, and how many windows that has; "" and 0 if there
        is none.
        """
        entries, oldest = self._entries, now - self._ttl_seconds
        depth = 0
        for one in chain:
            found = entries.get(one)
            if found is None or found[1] < oldest:
                break
            depth += 1
        # Entries of replicas that are gone count as removed.
        while depth:
            replica = entries[chain[depth - 1]][0]
            if replica in known:
                return replica, depth
            depth -= 1
        return "", 0

    def weight(self, replica: str, now: float) -> float:
        """How much of its cache is in use: the number of its entries, each halved every two minutes."""
        found = self._sums.get(replica)
        return 0.0 if found is None or self._landmark is None else found[0] * _power(self._landmark - now)

    def relative_weight(self, replica: str) -> float:
        """The same but for a factor that all replicas share at one moment, so it serves to compare them."""
        found = self._sums.get(replica)
        return 0.0 if found is None else found[0]

    def sweep(self, now: float, at_most: int) -> None:
        """Remove expired entries."""
        entries, oldest = self._entries, now - self._ttl_seconds
        for _ in range(at_most):
            if not entries or next(iter(entries.values()))[1] >= oldest:
                return
            self._add(entries.popitem(last=False)[1], -1)

    def _add(self, mark: tuple[str, float], count: int) -> None:
        """Add `count` entries to the weight of their replica, or take them away."""
        if not count:
            return
        replica, seen = mark
        if self._landmark is None or seen - self._landmark > _REBASE * HALF_LIFE_SECONDS:
            self._rebase(seen)
        assert self._landmark is not None
        found = self._sums.setdefault(replica, [0.0, 0])
        found[0] += count * _power(seen - self._landmark)
        found[1] += count
        if found[1] <= 0:
            del self._sums[replica]  # with it what rounding left over

    def _rebase(self, landmark: float) -> None:
        if self._landmark is not None:
            scale = _power(self._landmark - landmark)  # 0 after days, and then nothing is left of the old sums
            for found in self._sums.values():
                found[0] *= scale
        self._landmark = landmark


def _power(seconds: float) -> float:
    return float(2.0 ** (seconds / HALF_LIFE_SECONDS))


class Thresholds(Struct, frozen=True):
    """How much busier than the least busy replica one may be, and how much of a prompt counts as a match."""

    absolute: int = 2
    relative: float = 1.5
    least_match: float = 0.3

    def overridden(self, absolute: int, relative: float, least_match: float) -> Thresholds:
        """With those of a model; 0 means that it has none of its own."""
        return Thresholds(absolute or self.absolute, relative or self.relative, least_match or self.least_match)


FULL = -1  # in place of a count: this replica takes no more requests


def choose_by_prefix(
    busy: Sequence[int], hot: int | None, weigh: Callable[[int], float], thresholds: Thresholds
) -> int | None:
    """The position of the chosen replica: `hot`, which has the beginning of the prompt, unless it is much busier than
    others; else the one with the least in its cache among those that are not. None if all are full. `hot` is None
    without a sufficient match. Of equals the first is chosen.
    """
    least = min((count for count in busy if count != FULL), default=FULL)
    if least == FULL:
        return None
    most = min(least + thresholds.absolute, least * thresholds.relative + 1)
    if hot is not None and FULL < busy[hot] <= most:
        return hot
    chosen, lightest = None, 0.0
    for position, count in enumerate(busy):
        if FULL < count <= most:
            weight = weigh(position)
            if chosen is None or weight < lightest:
                chosen, lightest = position, weight
    return chosen
