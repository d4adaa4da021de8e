"""Legal layers of every odd kind, by name: what has to come out as umoci has it.

A case of `CASES` gets its own top directory and gives the entries of up to three layers; an image of `WHOLE` concerns
the root, or the archive itself, and stands alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.artifact.archives import GNU, OLD, directory, file, hardlink, header, padded, pax, symlink, tar

Layers = list[list[bytes]]
LONG = "n" * 200 + "/" + "m" * 150
DEEP = "/".join(["d"] * 60)

CASES: dict[str, Callable[[str], Layers]] = {
    "a whiteout hides a file": lambda p: [[file(f"{p}/x", b"1"), file(f"{p}/y")], [file(f"{p}/.wh.x")]],
    "a whiteout hides a directory": lambda p: [[file(f"{p}/x/q/r"), file(f"{p}/y")], [file(f"{p}/.wh.x")]],
    "a whiteout hides a link": lambda p: [[file(f"{p}/x"), symlink(f"{p}/l", "x")], [file(f"{p}/.wh.l")]],
    "a whiteout spares a file that came before it": lambda p: [
        [file(f"{p}/x", b"1")],
        [file(f"{p}/x", b"2"), file(f"{p}/.wh.x")],
    ],
    "a whiteout spares a file that comes after it": lambda p: [
        [file(f"{p}/x", b"1")],
        [file(f"{p}/.wh.x"), file(f"{p}/x", b"2")],
    ],
    "a whiteout before it empties a directory": lambda p: [
        [directory(f"{p}/d", 0o700), file(f"{p}/d/x", b"1")],
        [file(f"{p}/.wh.d"), file(f"{p}/d/y", b"2")],
    ],
    "a whiteout after it spares what the layer put below": lambda p: [
        [file(f"{p}/d/x", b"1"), file(f"{p}/d/e/z")],
        [file(f"{p}/d/y", b"2"), file(f"{p}/d/e/n"), file(f"{p}/.wh.d")],
    ],
    "a whiteout spares a directory of its layer but not its former content": lambda p: [
        [file(f"{p}/x/1"), file(f"{p}/x/2")],
        [directory(f"{p}/x", 0o711), file(f"{p}/.wh.x")],
    ],
    "a whiteout twice hides no more than once": lambda p: [
        [file(f"{p}/d/1")],
        [file(f"{p}/.wh.d"), file(f"{p}/d/2"), file(f"{p}/.wh.d"), file(f"{p}/d/.wh..wh..opq")],
    ],
    "an opaque mark before": lambda p: [
        [file(f"{p}/d/x", b"1"), file(f"{p}/d/e/z")],
        [file(f"{p}/d/.wh..wh..opq"), file(f"{p}/d/y", b"2")],
    ],
    "an opaque mark after": lambda p: [
        [file(f"{p}/d/x", b"1"), file(f"{p}/d/e/z")],
        [file(f"{p}/d/y", b"2"), file(f"{p}/d/e/k"), file(f"{p}/d/.wh..wh..opq")],
    ],
    "an opaque mark keeps the directory and its mode": lambda p: [
        [directory(f"{p}/d", 0o711), file(f"{p}/d/x")],
        [file(f"{p}/d/.wh..wh..opq")],
    ],
    "an opaque mark in a directory that is not there": lambda p: [
        [file(f"{p}/x", b"1")],
        [directory(f"{p}/b"), file(f"{p}/b/c/d/.wh..wh..opq")],
    ],
    "an opaque mark below a file": lambda p: [[file(f"{p}/l")], [file(f"{p}/l/.wh..wh..opq"), file(f"{p}/l/.wh.q")]],
    "a whiteout of nothing": lambda p: [[file(f"{p}/x", b"1")], [file(f"{p}/b/c/.wh.q"), file(f"{p}/.wh.nope")]],
    "whiteouts in the first layer": lambda p: [
        [file(f"{p}/a/.wh.x"), file(f"{p}/a/x"), file(f"{p}/b/y"), file(f"{p}/b/.wh..wh..opq"), file(f"{p}/c/.wh.z")]
    ],
    "a whiteout that is a directory, a link, or has contents": lambda p: [
        [file(f"{p}/{name}") for name in "abcd"],
        [directory(f"{p}/.wh.a"), symlink(f"{p}/.wh.b", "foo"), file(f"{p}/.wh.c", b"hello"), file(f"{p}/e", b"1")],
    ],
    "what is below the name of a whiteout": lambda p: [[file(f"{p}/a/x")], [file(f"{p}/.wh.a/y", b"1")]],
    "whiteouts that aufs leaves": lambda p: [[file(f"{p}/x")], [file(f"{p}/.wh..wh.plnk"), file(f"{p}/.wh..wh.aufs")]],
    "a whiteout after what it hid was linked to": lambda p: [
        [file(f"{p}/a", b"1")],
        [hardlink(f"{p}/c", f"{p}/a"), file(f"{p}/.wh.a")],
    ],
    "a file becomes a directory": lambda p: [[file(f"{p}/x")], [directory(f"{p}/x"), file(f"{p}/x/y")]],
    "a directory becomes a file": lambda p: [[file(f"{p}/x/y/z")], [file(f"{p}/x", b"1"), file(f"{p}/.wh.x")]],
    "a link becomes a directory": lambda p: [
        [directory(f"{p}/t"), symlink(f"{p}/a", "t")],
        [directory(f"{p}/a"), file(f"{p}/a/y")],
    ],
    "a directory becomes a link": lambda p: [[file(f"{p}/a/y"), directory(f"{p}/t")], [symlink(f"{p}/a", "t")]],
    "a link becomes a file": lambda p: [[file(f"{p}/t", b"1"), symlink(f"{p}/a", "t")], [file(f"{p}/a", b"2")]],
    "a file becomes a link": lambda p: [[file(f"{p}/a", b"1"), directory(f"{p}/t")], [symlink(f"{p}/a", "t")]],
    "a directory becomes a hard link": lambda p: [
        [file(f"{p}/a/y"), file(f"{p}/f", b"1")],
        [hardlink(f"{p}/a", f"{p}/f")],
    ],
    "a directory goes, comes back and has forgotten its mode": lambda p: [
        [directory(f"{p}/a", 0o700), directory(f"{p}/a/b", 0o700), file(f"{p}/a/b/c")],
        [file(f"{p}/a", b"in between")],
        [directory(f"{p}/a"), file(f"{p}/a/b/d")],
    ],
    "directories are merged": lambda p: [
        [directory(f"{p}/a", 0o700), file(f"{p}/a/x"), directory(f"{p}/b", 0o700), file(f"{p}/b/x")],
        [directory(f"{p}/a", 0o750), file(f"{p}/a/y"), file(f"{p}/b/y")],
    ],
    "parents that are not listed": lambda p: [[file(f"{p}/q/r/s", b"1")]],
    "directories listed after their content": lambda p: [
        [file(f"{p}/q/r", b"1"), directory(f"{p}/q", 0o711), directory(p, 0o700)]
    ],
    "read-only directories with content": lambda p: [
        [directory(f"{p}/d", 0o555), file(f"{p}/d/q", b"1")],
        [file(f"{p}/d/r", b"1"), file(f"{p}/d/.wh.q")],
    ],
    "modes": lambda p: [
        [
            *(file(f"{p}/f{mode:o}", b"1", mode) for mode in (0, 0o400, 0o555, 0o640, 0o777, 0o1755)),
            *(directory(f"{p}/d{mode:o}", mode) for mode in (0, 0o500, 0o1777, 0o2755, 0o4755)),
            file(f"{p}/d0/below"),
        ]
    ],
    "hard links, within and across layers": lambda p: [
        [file(f"{p}/a", b"1"), hardlink(f"{p}/b", f"{p}/a")],
        [hardlink(f"{p}/c", f"{p}/a"), hardlink(f"{p}/d/e", f"./{p}/b")],
    ],
    "a hard link with another mode": lambda p: [[file(f"{p}/a", b"1"), hardlink(f"{p}/b", f"{p}/a", 0o755)]],
    "a hard link to a link": lambda p: [
        [file(f"{p}/a", b"1"), symlink(f"{p}/s", "a"), hardlink(f"{p}/t", f"{p}/s", 0o777)],
        [symlink(f"{p}/dangling", "nope"), hardlink(f"{p}/u", f"{p}/dangling", 0o777)],
    ],
    "one name of a hard-linked file is replaced": lambda p: [
        [file(f"{p}/a", b"1"), hardlink(f"{p}/b", f"{p}/a"), file(f"{p}/c", b"3"), hardlink(f"{p}/d", f"{p}/c")],
        [file(f"{p}/a", b"2"), file(f"{p}/c", b"3", 0o600)],
    ],
    "one name of a hard-linked file is hidden": lambda p: [
        [file(f"{p}/a", b"1"), hardlink(f"{p}/b", f"{p}/a")],
        [file(f"{p}/.wh.a"), hardlink(f"{p}/c", f"{p}/b")],
    ],
    "a hard link to what the layer replaces later": lambda p: [
        [file(f"{p}/a", b"1")],
        [hardlink(f"{p}/b", f"{p}/a"), file(f"{p}/a", b"2")],
    ],
    "a hard link twice": lambda p: [
        [file(f"{p}/a", b"1"), file(f"{p}/c", b"2"), hardlink(f"{p}/b", f"{p}/a"), hardlink(f"{p}/b", f"{p}/c")]
    ],
    "entries twice": lambda p: [
        [
            file(f"{p}/f", b"1"),
            hardlink(f"{p}/h", f"{p}/f"),
            file(f"{p}/f", b"22", 0o600),
            directory(f"{p}/d", 0o700),
            file(f"{p}/d/x"),
            directory(f"{p}/d", 0o755),
            symlink(f"{p}/s", "x"),
            symlink(f"{p}/s", "y"),
        ]
    ],
    "links that lead nowhere, or in circles": lambda p: [
        [
            symlink(f"{p}/a", "x/y/z"),
            symlink(f"{p}/q/r", "../a"),
            symlink(f"{p}/q/t", "./././../q//r/"),
            symlink(f"{p}/l", "m"),
            symlink(f"{p}/m", "l"),
            symlink(f"{p}/n", "l/../m"),
        ]
    ],
    "through a link to a directory": lambda p: [
        [file(f"{p}/usr/bin/a", b"1"), symlink(f"{p}/bin", "usr/bin")],
        [file(f"{p}/bin/tool", b"2", 0o755), directory(f"{p}/bin/d", 0o711), file(f"{p}/bin/d/e")],
        [file(f"{p}/bin/.wh.a"), symlink(f"{p}/bin/l", "../x"), hardlink(f"{p}/h", f"{p}/bin/tool")],
    ],
    "through a link of the same layer": lambda p: [[symlink(f"{p}/l", "t"), file(f"{p}/l/x", b"1")]],
    "through a link to what is not there": lambda p: [[symlink(f"{p}/l", "t/u")], [file(f"{p}/l/x", b"1")]],
    "through a link that takes the place of a parent": lambda p: [
        [file(f"{p}/d/x")],
        [symlink(f"{p}/d", "e"), file(f"{p}/d/y", b"1")],
    ],
    "through links and upwards": lambda p: [
        [directory(f"{p}/a/b/c"), symlink(f"{p}/l", "a/b/c"), symlink(f"{p}/a/m", "../l/../n")],
        [file(f"{p}/a/m/x", b"1")],
    ],
    "an opaque mark below a link": lambda p: [
        [file(f"{p}/t/x"), file(f"{p}/t/y/z"), symlink(f"{p}/l", "t")],
        [file(f"{p}/l/.wh..wh..opq"), file(f"{p}/t/n", b"1")],
    ],
    "a whiteout below a link spares what its layer put there": lambda p: [
        [file(f"{p}/t/x"), symlink(f"{p}/l", "t")],
        [file(f"{p}/t/x", b"1"), file(f"{p}/l/.wh.x")],
    ],
    "a chain of links": lambda p: [
        [directory(f"{p}/d"), symlink(f"{p}/l0", "d")],
        [symlink(f"{p}/l{index}", f"l{index - 1}") for index in range(1, 40)],
        [file(f"{p}/l30/x", b"1")],
    ],
    "a link to the directory it is in": lambda p: [[symlink(f"{p}/l", ".")], [file(f"{p}/l/l/x", b"1")]],
    "set-id files": lambda p: [
        [file(f"{p}/su", b"1", 0o4755), file(f"{p}/wall", b"1", 0o2755), file(f"{p}/x", b"1", 0o6711)]
    ],
    "names written in odd ways": lambda p: [
        [directory(f"./{p}/"), directory(f"./{p}/a/"), file(f".//{p}///a//b//c", b"1"), file(f"{p}/a/./d", b"2")]
    ],
    "long names as GNU writes them": lambda p: [
        [file(f"{p}/{LONG}", b"1"), symlink(f"{p}/s", LONG), hardlink(f"{p}/" + "h" * 130, f"{p}/{LONG}")]
    ],
    "long names as pax writes them": lambda p: [
        [
            pax({"path": f"{p}/" + "ä" * 60 + "/x", "mtime": "1234.5"}) + header("short", size=1) + padded(b"1"),
            pax({"linkpath": "q" * 150}) + header(f"{p}/s", b"2", target="t"),
            pax({"path": "", "size": ""}) + header(f"{p}/empty-records", size=1) + padded(b"1"),
        ]
    ],
    "long names as ustar writes them": lambda p: [
        [header("c/" + "d" * 90, prefix=p.encode() + b"/" + b"x" * 100), header(f"{p}/gnu", magic=GNU)]
    ],
    "sixty levels": lambda p: [[file(f"{p}/{DEEP}/x", b"1")], [file(f"{p}/{DEEP}/y", b"1"), file(f"{p}/d/d/.wh.d")]],
    "names that are no text": lambda p: [
        [file(p.encode() + b"/\xff\xfe/\x80", b"1"), symlink(p.encode() + b"/\xe9", b"\xff\xfe")],
        [file(p.encode() + b"/\xff\xfe/.wh.\x80"), file(p.encode() + b"/\xff\xfe/\x81 \n", b"1")],
    ],
    "sizes in base 256 and in pax": lambda p: [
        [
            header(f"{p}/a", size=b"\x80" + bytes(10) + b"\x03") + padded(b"abc"),
            pax({"size": "5"}) + header(f"{p}/b", size=0) + padded(b"12345"),
            file(f"{p}/c", b"1"),
        ]
    ],
    "directories and links that claim a size": lambda p: [
        [
            header(f"{p}/d", b"5", size=5),
            file(f"{p}/f"),
            header(f"{p}/h", b"1", size=5, target=f"{p}/f"),
            file(f"{p}/x"),
        ]
    ],
    "headers older than ustar": lambda p: [
        [
            header(f"{p}/a", b"\x00", size=1, magic=OLD) + padded(b"1"),
            header(f"{p}/b/", b"\x00", magic=OLD),
            file(f"{p}/c/", b"a file, whatever its name ends in"),
        ]
    ],
    "empty files and large ones": lambda p: [
        [file(f"{p}/empty"), file(f"{p}/block", b"x" * 512), file(f"{p}/large", random.Random(1).randbytes(3_000_001))],
        [file(f"{p}/large", bytes(2_000_000)), file(f"{p}/empty", b"1")],
    ],
}
WHOLE: dict[str, list[bytes]] = {
    "an opaque root": [tar(file("a/x"), file("y")), tar(file(".wh..wh..opq"), file("z"), file("a/n"))],
    "the root as an entry": [tar(directory(".", 0o700), directory("./", 0o711), file("./a"))],
    "layers without entries": [tar(), tar(file("a")), b"", tar()],
    "no end mark": [tar(file("a", b"1"), end=b"")],
    "the last entry without padding": [tar(file("a", b"1"), header("b", size=700) + b"x" * 700, end=b"")],
    "the last entry with half of its padding": [tar(header("b", size=700) + b"x" * 800, end=b"")],
    "through a link to the root": [tar(symlink("l", ".")), tar(file("l/x", b"1"))],
    "half an end mark": [tar(file("a", b"1"), end=bytes(512))],
    "bytes after the end mark": [tar(file("a", b"1"), end=bytes(1024) + b"garbage" * 100), tar(file("b"))],
}


def combined() -> list[bytes]:
    """The layers of one image that has all of `CASES`."""
    layers: list[list[bytes]] = [[], [], []]
    for index, case in enumerate(CASES.values()):
        for layer, entries in zip(layers, case(f"case{index:02}"), strict=False):
            layer.extend(entries)
    return [tar(*entries) for entries in layers]
