"""Images made at random, legal ones: several layers of files, directories, links and whiteouts that get in each
other's way, written in the different ways that tar programs have.

A small model of the tree keeps them legal: nothing below a link or a file, no name twice in one layer as different
things, hard links only to files that are there.
"""

from __future__ import annotations

from random import Random

from tests.artifact.archives import directory, file, hardlink, header, padded, pax, symlink, tar

_NAMES = ("a", "b", "c", "ä", "n" * 120)


def random_image(chance: Random) -> list[bytes]:
    image = _Image(chance)
    return [image.layer() for _ in range(chance.randint(2, 5))]


def random_links(chance: Random) -> list[bytes]:
    """Layers that write, link and hide below links of all kinds. Not all are legal: two things may get one name."""
    files: list[str] = []
    return [tar(*(_linking(chance, files) for _ in range(chance.randint(3, 16)))) for _ in range(chance.randint(2, 4))]


def _linking(chance: Random, files: list[str]) -> bytes:
    steps = [chance.choice("abclmn") for _ in range(chance.randint(0, 2))]
    below = "".join(f"{step}/" for step in steps)
    match chance.choice(["file"] * 4 + ["directory", "symlink", "whiteout"] * 2 + ["hardlink", "opaque"]):
        case "file":
            files.append(below + chance.choice(["f1", "f2"]))
            return file(files[-1], chance.randbytes(chance.choice([0, 5, 600])))
        case "directory":
            return directory(below + chance.choice("abc"), chance.choice([0o755, 0o700, 0o555]))
        case "symlink":
            way = "/".join(chance.choice("abc") for _ in range(chance.randint(1, 2)))
            upwards = "../" * chance.randint(0, len(steps)) + way
            targets = [way, upwards, ".", f"/{way}", "/", "/l/a", f"/{way}/../a", "f1", "l"]
            return symlink(below + chance.choice("lmn"), chance.choice(targets))
        case "whiteout":
            return file(f"{below}.wh.{chance.choice(['a', 'b', 'f1', 'f2', 'l', 'm'])}")
        case "opaque":
            return file(f"{below}.wh..wh..opq") if steps else b""
        case _:
            return hardlink(f"{below}h", chance.choice(files)) if files and chance.random() < 0.5 else b""


class _Image:
    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self._tree: dict[str, str] = {}
        self._in_layer: dict[str, str] = {}

    def layer(self) -> bytes:
        self._in_layer = {}
        made = [self._entry() for _ in range(self._chance.randint(5, 40))]
        return tar(*(entry for entry in made if entry))

    def _entry(self) -> bytes:
        path = "/".join(self._chance.choice(_NAMES) for _ in range(self._chance.randint(1, 4)))
        if not self._is_reachable(path):
            return b""
        kind = self._chance.choice(["file", "file", "file", "directory", "symlink", "hardlink", "whiteout", "opaque"])
        if kind == "whiteout":
            self._hide(path, itself=True)
            parent, slash, name = path.rpartition("/")
            return file(f"{parent}{slash}.wh.{name}")
        if kind == "opaque":
            if self._tree.get(path, "directory") != "directory":
                return b""
            self._hide(path, itself=False)
            return file(f"{path}/.wh..wh..opq")
        return self._placed(path, kind)

    def _placed(self, path: str, kind: str) -> bytes:
        if self._in_layer.get(path, kind) != kind:
            return b""
        targets = [one for one, its in self._tree.items() if its in ("file", "hardlink") and one != path]
        targets = [one for one in targets if not one.startswith(path + "/")]
        if kind == "hardlink" and not targets:
            return b""
        if kind != "directory":
            self._tree = {one: its for one, its in self._tree.items() if not one.startswith(path + "/")}
        parts = path.split("/")
        for depth in range(1, len(parts)):
            self._tree["/".join(parts[:depth])] = self._in_layer["/".join(parts[:depth])] = "directory"
        self._tree[path] = self._in_layer[path] = kind
        if kind == "hardlink":
            return hardlink(path, self._chance.choice(targets))
        return self._written(path, kind)

    def _written(self, path: str, kind: str) -> bytes:
        mode = self._chance.choice([0o755, 0o644, 0o700, 0o555, 0o640, 0])
        if kind == "directory":
            return directory(path + self._chance.choice(["", "/"]), mode)
        if kind == "symlink":
            return symlink(path, self._chance.choice(["x", "./a", "a/b/c", "../" * path.count("/") + "a"]))
        content = self._chance.randbytes(self._chance.choice([0, 1, 511, 512, 513, 5000]))
        if self._chance.random() < 0.3:
            return pax({"path": path}) + header("x", size=len(content), mode=mode) + padded(content)
        return file(self._chance.choice(["", "./"]) + path, content, mode)

    def _is_reachable(self, path: str) -> bool:
        parts = path.split("/")
        return all(
            self._tree.get("/".join(parts[:depth]), "directory") == "directory" for depth in range(1, len(parts))
        )

    def _hide(self, path: str, *, itself: bool) -> None:
        self._tree = {
            one: its
            for one, its in self._tree.items()
            if one in self._in_layer or not (one.startswith(path + "/") or (itself and one == path))
        }
