"""Huffman decoding of HPACK strings (RFC 7541, appendix B), as other gRPC servers send them. Nothing here encodes.

The code is canonical: codes of one length ascend with their symbols, and codes ascend with their lengths. So the
lengths alone define it, and one search among the first codes of all lengths finds the symbol.
"""

from __future__ import annotations

from bisect import bisect_right

_END = 256
_ALIGNED_BITS = 32  # codes have 5 to 30 bits and are compared as numbers of this many
# Bits of the code of each byte, 32 bytes per line, and of the end mark.
_TABLE = (
    "13 23 28 28 28 28 28 28 28 24 30 28 28 30 28 28 28 28 28 28 28 28 30 28 28 28 28 28 28 28 28 28 "
    "06 10 10 12 13 06 08 11 10 10 08 11 08 06 06 06 05 05 05 06 06 06 06 06 06 06 07 08 15 06 12 10 "
    "13 06 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 07 08 07 08 13 19 13 14 06 "
    "15 05 06 05 06 05 06 06 06 05 07 07 06 06 06 05 06 07 06 05 05 06 07 07 07 07 07 15 11 14 13 28 "
    "20 22 20 20 22 22 22 23 22 23 23 23 23 23 24 23 24 24 22 23 24 23 23 23 23 21 22 23 22 23 23 24 "
    "22 21 20 22 22 23 23 21 23 22 22 24 21 22 23 23 21 21 22 21 23 22 23 23 20 22 22 22 23 22 22 23 "
    "26 26 20 19 22 23 22 25 26 26 26 27 27 26 24 25 19 21 26 27 27 26 27 24 21 21 26 26 28 27 27 27 "
    "20 24 20 21 22 21 21 23 22 22 25 25 24 24 26 23 26 27 26 26 27 27 27 27 27 28 27 27 27 27 27 26 "
    "30"
)
_BITS = tuple(int(bits) for bits in _TABLE.split())


def _first_codes() -> tuple[list[int], list[int], list[list[int]]]:
    """For each length that occurs, ascending: its first code, left-aligned; the length; its symbols in order."""
    firsts, lengths, symbols = [], [], []
    code = 0
    for length in sorted(set(_BITS)):
        having = [symbol for symbol, bits in enumerate(_BITS) if bits == length]
        firsts.append(code)
        lengths.append(length)
        symbols.append(having)
        code += len(having) << (_ALIGNED_BITS - length)
    return firsts, lengths, symbols


_FIRSTS, _LENGTHS, _SYMBOLS = _first_codes()


def decode(coded: bytes) -> bytes:
    """Raises ValueError if the bits are not a sequence of codes and fewer than eight ones."""
    plain = bytearray()
    held, width = 0, 0  # bits that are not decoded yet
    for byte in coded:
        held = held << 8 | byte
        width += 8
        while width >= 5:
            # Ones are added on the right: a code that is still incomplete then never looks like a shorter one.
            missing = _ALIGNED_BITS - width
            aligned = (held << missing | (1 << missing) - 1) if missing > 0 else held >> -missing
            index = bisect_right(_FIRSTS, aligned) - 1
            length = _LENGTHS[index]
            if length > width:
                break
            symbol = _SYMBOLS[index][aligned - _FIRSTS[index] >> _ALIGNED_BITS - length]
            if symbol == _END:
                raise ValueError("the end mark inside a string")
            plain.append(symbol)
            width -= length
            held &= (1 << width) - 1
    if width > 7 or held != (1 << width) - 1:
        raise ValueError("the padding of a string")
    return bytes(plain)
