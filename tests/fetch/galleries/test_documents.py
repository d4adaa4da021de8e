"""Documents from strangers: what is read, what is refused, and that refusing costs next to nothing."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap

import pytest

from enginehouse.core.errors import Invalid
from enginehouse.fetch.galleries import documents as gallery_documents
from enginehouse.fetch.galleries.documents import parse_backends, parse_models, read_backends, read_list

MIB = 1024 * 1024

# Every kind of document that must be refused, as Python that makes it.
HOSTILE = {
    "billion laughs": "b'- &a0 [x,x,x,x,x,x,x,x,x]\\n' + b''.join("
    "b'- &a%d [' % n + b','.join([b'*a%d' % (n - 1)] * 9) + b']\\n' for n in range(1, 12))",
    "laughs in maps": "b'- &a0 {k: v}\\n' + b''.join("
    "b'- &a%d {' % n + b', '.join(b'k%d: *a%d' % (k, n - 1) for k in range(9)) + b'}\\n' for n in range(1, 12))",
    "laughs in merges": "b'- &a0 {' + b', '.join(b'k%d: v' % k for k in range(300)) + b'}\\n' + b''.join("
    "b'- {<<: [' + b','.join([b'*a0'] * 50) + b']}\\n' for n in range(50))",
    "quadratic strings": "b'- &a \"' + b'x' * 500000 + b'\"\\n- [' + b','.join([b'*a'] * 200000) + b']'",
    "a hundred thousand entries": "b''.join(b'- {name: n%d, uri: x}\\n' % n for n in range(100000))",
    "a million items": "b'- x\\n' * 1000000",
    "100 MB": "b'#' * (100 * 1024 * 1024)",
    "5 MiB and a byte": "b'- ' + b'x' * (5 * 1024 * 1024 - 1)",
    "deep lists": "b'[' * 2000000",
    "deep maps": "b'{a: ' * 500000",
    "deep blocks": "b''.join(b' ' * n + b'- \\n' for n in range(1, 2000))",
    "a cycle": "b'- &a [*a]'",
    "a longer cycle": "b'- &a {x: [{y: *a}]}'",
    "an unknown alias": "b'- *nobody'",
    "objects": "b'- !!python/object/apply:os.system [\"true\"]'",
    "a tag": "b'- !thing {name: x}'",
    "a set": "b'- !!set {a, b}'",
    "binary": "b'- !!binary aGVsbG8='",
    "a key twice": "b'- name: a\\n  name: b'",
    "a key twice, once quoted": "b'- name: a\\n  \"name\": b'",
    "a merge twice": "b'- &a {x: y}\\n- {<<: *a, <<: *a}'",
    "a list as key": "b'- ? [a]\\n  : b'",
    "an alias as key": "b'- &a x\\n- *a : b'",
    "a merge of a text": "b'- {<<: text}'",
    "NUL": "b'- name: a\\x00b'",
    "latin-1": "b'- name: caf\\xe9'",
    "utf-16": "'- name: a'.encode('utf-16')",
    "two documents": "b'- a\\n---\\n- b'",
    "a map": "b'name: not a list'",
    "a text": "b'just a text'",
    "broken": "b'- {'",
    "html": "b'<html><body>{not: [yaml</body></html>'",
    "a control character": "b'- a\\x07b'",
}


def test_every_hostile_document_is_refused_in_two_seconds_and_without_a_hundred_megabytes() -> None:
    """F-105. Of the processor's time: a machine that is busy with other things is not what is tested."""
    program = """
        import sys, time
        from enginehouse.core.errors import Invalid
        from enginehouse.fetch.galleries.documents import read_backends

        def peak():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) // 1024

        for name, source in eval(sys.argv[1]).items():
            document = eval(source)
            with open("/proc/self/clear_refs", "w") as refs:
                refs.write("5")
            before, began = peak(), time.process_time()
            try:
                read_backends(document, "g")
                outcome = "accepted"
            except Invalid as error:
                outcome = error.message
            print(name, round(time.process_time() - began, 2), peak() - before, outcome, sep="|")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), repr(HOSTILE)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    seen = [line.split("|") for line in done.stdout.splitlines()]
    assert [line[0] for line in seen] == list(HOSTILE)
    for name, seconds, grown, outcome in seen:
        assert outcome.startswith("cannot read the gallery g: "), (name, outcome)
        assert float(seconds) <= 2.0, (name, seconds)
        assert int(grown) <= 100, (name, grown)
        assert len(outcome) < 300, name


def test_a_document_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    document = b"- {name: n, uri: x}\n" * 2000
    assert len(read_list(document, "g")) == 2000
    monkeypatch.setattr(gallery_documents, "LIMIT_SECONDS", -1.0)
    with pytest.raises(Invalid, match="takes more than"):
        read_list(document, "g")


def test_the_limit_counts_every_alias_as_what_it_stands_for() -> None:
    # Each line is a list, its bracket and 999 aliases of one value.
    line = b"- [" + b",".join([b"*a"] * 999) + b"]\n"
    fits = b"- &a x\n" + line * 99
    assert len(read_list(fits, "g")) == 100
    with pytest.raises(Invalid, match="100000 values"):
        read_list(fits + line, "g")


def test_anchors_and_merges_of_localai_work() -> None:
    document = b"""
- &common
  name: a
  license: MIT
  tags: [one]
- !!merge <<: *common
  name: b
- &again
  <<: *common
  name: c
  license: BSD
- name: d
  <<: [*again, *common]
- <<: *again
  name: e
- *common
"""
    assert [(entry.name, entry.license, entry.tags) for entry in parse_backends(document, "g")] == [
        ("a", "MIT", ("one",)),
        ("b", "MIT", ("one",)),
        ("c", "BSD", ("one",)),
        ("d", "BSD", ("one",)),
        ("e", "BSD", ("one",)),
        ("a", "MIT", ("one",)),
    ]


def test_plain_values_stay_as_they_were_written() -> None:
    document = b"- {name: 7, version: 1.10, license: no, uri: 2024-01-01, description: 0x1F, size_bytes: 12, alias: ~}"
    (entry,) = parse_backends(document, "g")
    assert (entry.name, entry.version, entry.license, entry.uri) == ("7", "1.10", "no", "2024-01-01")
    assert (entry.description, entry.size_bytes, entry.alias) == ("0x1F", 12, "")


def test_a_bad_entry_is_skipped_and_named(caplog: pytest.LogCaptureFixture) -> None:
    document = b"""
- {name: good, uri: x}
- {name: [list], uri: x}
- uri: nameless
- plain text
- name: ../bad
- {name: spaced, uri: "a b"}
- {name: long, uri: %s}
- {name: digest, uri: x, sha256: abc}
- {name: target, capabilities: {default: ../../etc}}
- {name: alias, uri: x, alias: a/b}
- {name: size, uri: x, size_bytes: many}
- {name: good2, future: 1}
""" % (b"x" * 3000)
    with caplog.at_level(logging.WARNING):
        entries, skipped = read_backends(document, "g")
    assert [entry.name for entry in entries] == ["good", "good2"]
    assert [one.entry for one in skipped] == [
        "#2",
        "#3",
        "#4",
        "../bad",
        "spaced",
        "long",
        "digest",
        "target",
        "alias",
        "size",
    ]
    assert all(one.reason for one in skipped)
    assert len(caplog.records) == len(skipped)
    assert "gallery=g entry='../bad'" in caplog.text


def test_a_thousand_bad_entries_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert len(read_backends(b"- bad\n" * 1000, "g")[1]) == 1000
    assert len(caplog.records) == 21


def test_an_empty_document_is_an_empty_gallery() -> None:
    assert parse_backends(b"", "g") == ()
    assert parse_backends(b"[]", "g") == ()
    assert parse_models(b"# nothing\n", "g") == ()
