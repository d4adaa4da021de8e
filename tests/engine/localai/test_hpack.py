"""Header compression: the examples of the standard, what another encoder makes of every byte, and bombs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.engine.localai import huffman
from enginehouse.engine.localai.hpack import NO_TABLE, TABLE_BYTES, Decoder, Header, HeaderListTooLarge, encode

LIMIT = 16_384
# All bytes from 0 to 255 as the hpack package of Go's x/net codes them.
EVERY_BYTE = bytes.fromhex(
    "ffc7fffd8fffffe2fffffe3fffffe4fffffe5fffffe6fffffe7fffffe8ffffeafffffff3fffffa7fffffabffffffdfffffebfffffecfffff"
    "edfffffeefffffefffffff0ffffff1ffffff2fffffffbfffffcffffffd3fffffd7fffffdbfffffdffffffe3fffffe7fffffebfffffed4fe3"
    "f9ffaffcabf1febfafefe7fdfd2cbb00089969b71d79fb9f7fff20ffbff3ff50ddbd7f061c58f265cd9f469d5af66dddbf871e5f9cff7ff7"
    "fffc3ff9ffe45fff4719242cb34e6e9d68a6a3d7dac426defe3cfaf7fffbfe7ffbffdffffffcfffe6ffff4bfff9ffffa3fffd3ffff53fffd"
    "5ffffb3fffeb7fffdaffffb7ffff73fffeeffffdeffffebffffbfffffd9ffffdbfffebffffe0ffffeeffffc3ffff8bffff1ffffe4fffee7f"
    "ffb1ffff97fffd9ffffcdffff9fffffbffffdafffeeffff4ffffb7fffee7fffe8ffffd3fffdeffffd5fffeeffffbdffffe1fffdfffff7fff"
    "ff5ffffecffff07fff87fffe0ffff17fffedffff87ffff77fffeffffeaffff8bfffe3ffff93ffff87fffcbffff37ffff1fffff83ffffe1ff"
    "febfffe3ffff3fffff2ffffa3ffffd9fffff17ffffc7fffff27ffffdefffffbffffff2fffff8fffffb7fff97fff8fffffe6fffffc1fffff8"
    "7ffffe7fffffc5ffffe5fffe4ffff2fffffd1fffff4ffffffefffffe3fffffc9fffff97fffb3ffffcffffb7fffcdffff4ffff9ffffd1ffff"
    "cffffeaffffafffffddffffeffffff4fffff5fffffabffffa7ffffd7fffff9bffffecfffffb7fffff3fffffe8fffffd3fffffabfffff5fff"
    "ffff7ffffecfffffdbfffffbbfffff7ffffff0fffffbbf"
)


def test_every_byte_is_decoded_as_another_encoder_coded_it() -> None:
    assert huffman.decode(EVERY_BYTE) == bytes(range(256))


@pytest.mark.parametrize("coded", ["ff", "fffffffc", "ffffffff", "06", "07ff", "1f00"])
def test_wrong_padding_and_the_end_mark_are_refused(coded: str) -> None:
    """Eight ones and more are no padding; a zero among them is neither; the end mark is 30 ones."""
    with pytest.raises(ValueError):
        huffman.decode(bytes.fromhex(coded))


def test_the_responses_of_the_standard_are_decoded_with_evictions() -> None:
    """RFC 7541, C.6: a table of 256 bytes, so that the third response evicts entries of the first."""
    decoder = Decoder(LIMIT)
    size = "3fe101"  # 256 bytes
    first = decoder.decode(
        bytes.fromhex(
            size
            + "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff"
            + "6e919d29ad171863c78f0b97c8e9ae82ae43d3"
        )
    )
    assert first == [
        (b":status", b"302"),
        (b"cache-control", b"private"),
        (b"date", b"Mon, 21 Oct 2013 20:13:21 GMT"),
        (b"location", b"https://www.example.com"),
    ]
    second = decoder.decode(bytes.fromhex("4883640effc1c0bf"))
    assert second == [(b":status", b"307"), *first[1:]]
    third = decoder.decode(
        bytes.fromhex(
            "88c16196d07abe941054d444a8200595040b8166e084a62d1bffc05a839bd9ab77ad94e7821dd7f2e6c7b335dfdfcd5b3960d5af27087f"
            "3672c1ab270fb5291f9587316065c003ed4ee5b1063d5007"
        )
    )
    assert third == [
        (b":status", b"200"),
        (b"cache-control", b"private"),
        (b"date", b"Mon, 21 Oct 2013 20:13:22 GMT"),
        (b"location", b"https://www.example.com"),
        (b"content-encoding", b"gzip"),
        (b"set-cookie", b"foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1"),
    ]


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=200), st.binary(max_size=2000)), max_size=5))
def test_what_is_encoded_is_decoded(headers: list[Header]) -> None:
    assert Decoder(LIMIT * 10).decode(NO_TABLE + encode(headers)) == headers


def test_a_secret_is_marked_and_a_known_pair_is_one_byte() -> None:
    assert encode([(b":method", b"POST")]) == b"\x83"
    assert encode([(b"authorization", b"x")], frozenset({b"authorization"})) == b"\x1f\x08\x01x"


@pytest.mark.parametrize(
    ("cause", "block"),
    [
        ("the index 0", "80"),
        ("an index beyond the table", "be"),
        ("a number that never ends", "ffffffffffffffffffff"),
        ("a number that is cut short", "ff"),
        ("a string that is cut short", "00056162"),
        ("a value that is missing", "000161"),
        ("a table larger than allowed", "3fe23f"),
        ("a table size after headers", "8820"),
    ],
)
def test_a_broken_block_is_refused(cause: str, block: str) -> None:
    with pytest.raises(ValueError):
        Decoder(LIMIT).decode(bytes.fromhex(block))


def test_the_largest_table_is_allowed() -> None:
    assert Decoder(LIMIT).decode(bytes.fromhex("3fe11f")) == []


def test_a_small_block_with_a_large_meaning_is_not_kept_and_the_table_stays_right() -> None:
    decoder = Decoder(LIMIT)
    value = b"v" * (TABLE_BYTES - 40)
    added = b"\x40\x01n" + encode([(b"x", value)])[3:]
    assert decoder.decode(added) == [(b"n", value)]
    with pytest.raises(HeaderListTooLarge):
        decoder.decode(b"\xbe" * 10_000)  # 40 MB of headers
    assert decoder.decode(b"\xbe") == [(b"n", value)]


def test_an_entry_larger_than_the_table_empties_it() -> None:
    decoder = Decoder(LIMIT)
    decoder.decode(b"\x40\x01n\x01v")
    assert decoder.decode(b"\xbe") == [(b"n", b"v")]
    decoder.decode(b"\x40" + encode([(b"n", b"v" * TABLE_BYTES)])[1:])
    with pytest.raises(ValueError):
        decoder.decode(b"\xbe")


def test_a_block_means_something_else_after_the_table_changed() -> None:
    """Equal blocks are remembered, and that must end with every change."""
    decoder = Decoder(LIMIT)
    decoder.decode(b"\x40\x01n\x01a")
    assert [decoder.decode(b"\xbe"), decoder.decode(b"\xbe")] == [[(b"n", b"a")]] * 2
    decoder.decode(b"\x40\x01n\x01b")
    assert decoder.decode(b"\xbe") == [(b"n", b"b")]
