"""Header compression (HPACK, RFC 7541): a full decoder for what engines send, literals only for what we send.

The decoder is shared by all streams of a connection and must see every header block, also those of streams that are
already closed: after a block that was left out every later one would be read wrongly. An error is therefore the end of
the connection. A list that is only too large is decoded to its end without keeping it, so the connection survives it.
"""

from __future__ import annotations

from enginehouse.engine.localai import huffman

Header = tuple[bytes, bytes]

TABLE_BYTES = 4096  # HTTP/2's default; the peer's encoder may use this much and no more
ENTRY_BYTES = 32  # what the standard adds to the length of a name and a value
_REMEMBERED_BLOCKS = 64

_STATIC: tuple[Header, ...] = tuple(
    (name.encode(), value.encode())
    for name, _, value in (
        line.partition(" ")
        for line in (
            ":authority",
            ":method GET",
            ":method POST",
            ":path /",
            ":path /index.html",
            ":scheme http",
            ":scheme https",
            ":status 200",
            ":status 204",
            ":status 206",
            ":status 304",
            ":status 400",
            ":status 404",
            ":status 500",
            "accept-charset",
            "accept-encoding gzip, deflate",
            "accept-language",
            "accept-ranges",
            "accept",
            "access-control-allow-origin",
            "age",
            "allow",
            "authorization",
            "cache-control",
            "content-disposition",
            "content-encoding",
            "content-language",
            "content-length",
            "content-location",
            "content-range",
            "content-type",
            "cookie",
            "date",
            "etag",
            "expect",
            "expires",
            "from",
            "host",
            "if-match",
            "if-modified-since",
            "if-none-match",
            "if-range",
            "if-unmodified-since",
            "last-modified",
            "link",
            "location",
            "max-forwards",
            "proxy-authenticate",
            "proxy-authorization",
            "range",
            "referer",
            "refresh",
            "retry-after",
            "server",
            "set-cookie",
            "strict-transport-security",
            "transfer-encoding",
            "user-agent",
            "vary",
            "via",
            "www-authenticate",
        )
    )
)
_NAME_INDEX = {name: index for index, (name, _) in reversed(list(enumerate(_STATIC, start=1)))}
_PAIR_INDEX = {pair: index for index, pair in enumerate(_STATIC, start=1)}

NO_TABLE = (
    b"\x20"  # before the first block of a connection: the table of our side has no room, whatever the peer allows
)


class HeaderListTooLarge(Exception):
    """The block was decoded, and the table is right; its headers are more than the limit."""


class Decoder:
    """The dynamic table of one connection. Any ValueError leaves it useless."""

    def __init__(self, max_list_bytes: int) -> None:
        self._max_list_bytes = max_list_bytes
        self._entries: list[Header] = []  # the newest last, so that adding is cheap
        self._held_bytes = 0
        self._room_bytes = TABLE_BYTES
        # Blocks that changed nothing mean the same until something changes: nearly all answers of an engine are equal.
        self._known: dict[bytes, list[Header]] = {}

    def decode(self, block: bytes) -> list[Header]:
        known = self._known.get(block)
        if known is not None:
            return known
        headers: list[Header] = []
        list_bytes, position, is_changed = 0, 0, False
        while position < len(block):
            first = block[position]
            if first >= 0x80:  # indexed
                index, position = _integer(block, position, 7)
                header = self._entry(index)
            elif first & 0xE0 == 0x20:  # a new size of the table
                if headers:
                    raise ValueError("a size of the table after headers")
                size, position = _integer(block, position, 5)
                if size > TABLE_BYTES:
                    raise ValueError("a table larger than was allowed")
                self._room_bytes, is_changed = size, True
                self._evict(0)
                continue
            else:
                is_added = first >= 0x40
                index, position = _integer(block, position, 6 if is_added else 4)
                if index:
                    name = self._entry(index)[0]
                else:
                    name, position = _string(block, position)
                value, position = _string(block, position)
                header = (name, value)
                if is_added:
                    is_changed = True
                    self._add(header)
            list_bytes += len(header[0]) + len(header[1]) + ENTRY_BYTES
            if list_bytes <= self._max_list_bytes:
                headers.append(header)
        if is_changed:
            self._known.clear()
        if list_bytes > self._max_list_bytes:
            raise HeaderListTooLarge
        if not is_changed and len(self._known) < _REMEMBERED_BLOCKS and len(block) <= 256:
            self._known[block] = headers
        return headers

    def _entry(self, index: int) -> Header:
        if index == 0:
            raise ValueError("the index 0")
        if index <= len(_STATIC):
            return _STATIC[index - 1]
        index -= len(_STATIC)
        if index > len(self._entries):
            raise ValueError("an index beyond the table")
        return self._entries[-index]

    def _add(self, header: Header) -> None:
        size = len(header[0]) + len(header[1]) + ENTRY_BYTES
        self._evict(size)
        if size <= self._room_bytes:  # one that is larger empties the table and is not kept
            self._entries.append(header)
            self._held_bytes += size

    def _evict(self, wanted_bytes: int) -> None:
        entries, gone = self._entries, 0
        while gone < len(entries) and self._held_bytes + wanted_bytes > self._room_bytes:
            name, value = entries[gone]
            self._held_bytes -= len(name) + len(value) + ENTRY_BYTES
            gone += 1
        del entries[:gone]


def encode(headers: list[Header], secret: frozenset[bytes] = frozenset()) -> bytes:
    """A block that uses the static table only, so that it may be sent any number of times on any connection.

    Values of `secret` names are marked: no relay on the way may put them into a table.
    """
    block = bytearray()
    for name, value in headers:
        index = _PAIR_INDEX.get((name, value), 0)
        if index:
            block += _prefixed(index, 7, 0x80)
            continue
        block += _prefixed(_NAME_INDEX.get(name, 0), 4, 0x10 if name in secret else 0)
        if name not in _NAME_INDEX:
            block += _prefixed(len(name), 7, 0) + name
        block += _prefixed(len(value), 7, 0) + value
    return bytes(block)


def _prefixed(number: int, bits: int, flags: int) -> bytes:
    full = (1 << bits) - 1
    if number < full:
        return bytes((flags | number,))
    coded = bytearray((flags | full,))
    number -= full
    while number >= 128:
        coded.append(number & 127 | 128)
        number >>= 7
    coded.append(number)
    return bytes(coded)


def _integer(block: bytes, position: int, bits: int) -> tuple[int, int]:
    full = (1 << bits) - 1
    number = block[position] & full
    position += 1
    if number < full:
        return number, position
    for shift in (0, 7, 14, 21):  # no honest number needs more than 28 further bits, and each octet could be padding
        if position >= len(block):
            break
        octet = block[position]
        position += 1
        number += (octet & 127) << shift
        if octet < 128:
            return number, position
    raise ValueError("a number that is cut short or too long")


def _string(block: bytes, position: int) -> tuple[bytes, int]:
    if position >= len(block):
        raise ValueError("a string that is missing")
    is_coded = block[position] >= 128
    length, start = _integer(block, position, 7)
    end = start + length
    if end > len(block):
        raise ValueError("a string that is cut short")
    text = block[start:end]
    return (huffman.decode(text) if is_coded else text), end
