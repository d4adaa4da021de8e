"""The model of a request that is a form."""

from __future__ import annotations

from email.message import Message
from email.parser import BytesParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.core.form import MAX_FIELD_BYTES, MAX_PARTS, boundary_of, field_of, form_type


def form(boundary: str, *parts: tuple[str, bytes]) -> bytes:
    pieces = [
        b'--%s\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
        % (boundary.encode(), name.encode(), b'; filename="f"' if name == "file" else b"", content)
        for name, content in parts
    ]
    return b"".join(pieces) + b"--%s--\r\n" % boundary.encode()


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ("multipart/form-data; boundary=abc", "abc"),
        ('multipart/form-data; boundary="a b:c"', "a b:c"),
        ("Multipart/Form-Data;charset=utf-8;boundary=----WebKitFormBoundaryX", "----WebKitFormBoundaryX"),
        ("multipart/form-data", None),
        ("multipart/mixed; boundary=abc", None),
        ("application/json", None),
        ("", None),
        ("multipart/form-data; boundary=", None),
        ("multipart/form-data; boundary=" + "x" * 71, None),
        ('multipart/form-data; boundary="a\r\nb"', None),
        ("multipart/form-data; boundary=ä", None),
    ],
)
def test_only_a_plain_boundary_counts(content_type: str, boundary: str | None) -> None:
    assert boundary_of(content_type) == boundary


@pytest.mark.parametrize("boundary", ["abc", "a b:c", "----WebKitFormBoundaryX", "x" * 70])
def test_a_content_type_is_written_as_it_is_read(boundary: str) -> None:
    assert boundary_of(form_type(boundary)) == boundary


def test_the_field_is_found_before_and_after_a_file() -> None:
    sound = b'\x00\xff--x\r\n\r\nname="model"' * 1000
    assert field_of(form("x", ("model", b"whisper"), ("file", sound)), "x", "model") == "whisper"
    assert field_of(form("xy", ("file", sound), ("model", "größe".encode())), "xy", "model") == "größe"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--x",
        b"--x--\r\n",
        b"--x\r\n",
        b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper',  # cut off
        form("x", ("other", b"whisper")),
        form("x", ("model", b"\xff\xfe")),
        form("x", ("model", b"m" * (MAX_FIELD_BYTES + 1))),
        form("x", *[(f"f{number}", b"") for number in range(MAX_PARTS)], ("model", b"late")),
        b'--x\r\nContent-Disposition: form-data; name="other"; x="' + b"y" * 9000 + b'"\r\n\r\nv\r\n--x--',
    ],
)
def test_a_form_without_a_readable_field_has_none(body: bytes) -> None:
    assert field_of(body, "x", "model") is None


names = st.sampled_from(["model", "file", "language", "prompt"])
contents = st.binary(max_size=60).filter(lambda content: b"--edge" not in content and not content.endswith(b"\r"))


@given(st.lists(st.tuples(names, contents), max_size=6))
def test_it_finds_what_the_standard_library_finds(parts: list[tuple[str, bytes]]) -> None:
    body = form("edge", *parts)
    head = b"Content-Type: multipart/form-data; boundary=edge\r\n\r\n"
    parsed = BytesParser().parsebytes(head + body)
    found: list[bytes] = []
    for part in parsed.get_payload() if parsed.is_multipart() else []:
        assert isinstance(part, Message)
        if part.get_param("name", header="content-disposition") == "model":
            # The library changes line ends in what it takes for text, so the content is taken from what was made.
            found.append(next(content for name, content in parts if name == "model"))
    expected = None
    if found:
        try:
            expected = found[0].decode()
        except UnicodeDecodeError:
            expected = None
    assert field_of(body, "edge", "model") == expected


@given(st.binary(max_size=300), st.sampled_from(["x", "--", "a b"]))
def test_any_bytes_give_a_part_of_them_or_nothing(body: bytes, boundary: str) -> None:
    found = field_of(body, boundary, "model")
    assert found is None or found.encode() in body
