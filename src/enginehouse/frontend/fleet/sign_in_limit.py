"""How often one address may fail to sign in.

Secrets are too long to be guessed; the limit is there so that guessing costs no queries. Each frontend counts for
itself. An attempt counts as a failure from its beginning, so that many at once are no way around the limit. Addresses
of one IPv6 network are one: whoever has one of them has all.
"""

from __future__ import annotations

import math
from ipaddress import IPv6Address, ip_address

MOST_FAILURES = 10  # a person who pastes wrong links needs fewer
WINDOW_SECONDS = 60.0
MOST_ADDRESSES = 4096  # that are remembered; the oldest are forgotten first
_NETWORK_BITS = 64


class SignInLimit:
    def __init__(self) -> None:
        self._failures: dict[str, tuple[float, int]] = {}  # when the first one was, and how many

    def begin(self, address: str, now: float) -> float:
        """Count an attempt. Returns 0.0, or in how many seconds this address may try again."""
        key = network_of(address)
        began_at, count = self._failures.get(key, (now, 0))
        if now - began_at >= WINDOW_SECONDS:
            began_at, count = now, 0
        if count >= MOST_FAILURES:
            return began_at + WINDOW_SECONDS - now
        # Again at the end of the dict: the first of it is the one to forget.
        self._failures.pop(key, None)
        self._failures[key] = began_at, count + 1
        if len(self._failures) > MOST_ADDRESSES:
            del self._failures[next(iter(self._failures))]
        return 0.0

    def forgive(self, address: str) -> None:
        """The attempt was no failure."""
        key = network_of(address)
        if key in self._failures:
            began_at, count = self._failures[key]
            self._failures[key] = began_at, max(0, count - 1)

    def retry_seconds(self, wait_seconds: float) -> float:
        return max(1.0, math.ceil(wait_seconds))


def network_of(address: str) -> str:
    """The address, or the network of an IPv6 address."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, IPv6Address) and found.ipv4_mapped is None:
        return str(IPv6Address(int(found) >> _NETWORK_BITS << _NETWORK_BITS))
    return str(found)
