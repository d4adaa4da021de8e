"""Wheels as bytes: deterministic, complete, and with a record that is true."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile

from enginehouse.core.wheel import PackageFacts, wheel_bytes, wheel_name

FACTS = PackageFacts(
    name="thing",
    version="1.2",
    summary="A thing.",
    license="MIT",
    requires_python=">=3.11",
    requirements=["b>=2", "a>=1"],
    commands={"thing": "thing.main:main"},
)
FILES = {"thing/__init__.py": b"", "thing/main.py": b"def main(): pass\n", "thing/a,b.txt": b"x"}


def test_the_order_of_files_and_requirements_does_not_change_the_bytes() -> None:
    turned = dict(reversed(FILES.items()))
    other = PackageFacts(
        name="thing",
        version="1.2",
        summary="A thing.",
        license="MIT",
        requires_python=">=3.11",
        requirements=["a>=1", "b>=2"],
        commands={"thing": "thing.main:main"},
    )
    assert wheel_bytes(FACTS, FILES) == wheel_bytes(other, turned)
    assert wheel_name(FACTS) == "thing-1.2-py3-none-any.whl"


def test_another_byte_makes_another_wheel() -> None:
    assert wheel_bytes(FACTS, FILES) != wheel_bytes(FACTS, {**FILES, "thing/__init__.py": b"#"})


def test_the_record_names_every_file_with_its_digest_and_size() -> None:
    with zipfile.ZipFile(io.BytesIO(wheel_bytes(FACTS, FILES))) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    record = list(csv.reader(io.StringIO(contents["thing-1.2.dist-info/RECORD"].decode())))
    assert {name for name, _, _ in record} == set(contents)
    for name, digest, size in record:
        if name.endswith("RECORD"):
            assert (digest, size) == ("", "")
            continue
        wanted = base64.urlsafe_b64encode(hashlib.sha256(contents[name]).digest()).rstrip(b"=").decode()
        assert (digest, size) == (f"sha256={wanted}", str(len(contents[name])))
    assert "Requires-Dist: a>=1\n" in contents["thing-1.2.dist-info/METADATA"].decode()
    assert "thing = thing.main:main" in contents["thing-1.2.dist-info/entry_points.txt"].decode()
