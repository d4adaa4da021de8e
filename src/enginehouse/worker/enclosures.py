"""Enclosures: what one engine may use of this machine.

An engine may read its own tree and model, and write to a home directory and to a temporary directory that is removed
with the process. The rest of the data directory is hidden. The home belongs to the backend: compiled and cached files
survive until the backend is removed. Without confinement, enclosures do not affect how an engine is started.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from enginehouse.core.installation import RUN_FILE
from enginehouse.host import confinement, disk, graphics, ownership
from enginehouse.host.confinement import Allowed, Confined, Confinement
from enginehouse.worker import writable_trees

# Of the nonce, for the temporary directory: the kernel allows 107 characters for the path of a socket in it.
_NAME_LENGTH = 8
_FIRST_LINE_BYTES = 512
_REFUSAL = re.compile(r"permission denied|operation not permitted|EACCES|EPERM", re.IGNORECASE)


class Enclosure(Struct, frozen=True, kw_only=True):
    """The enclosure of one process."""

    allowed: Allowed
    tree: Path  # the directory to start from: the backend's tree or a stand-in
    environment: dict[str, str] = {}


class EngineNeeds(Struct, frozen=True, kw_only=True):
    """What one process needs access to."""

    directory: str  # the backend's directory
    nonce: str
    tree: Path
    read: tuple[Path, ...] = ()  # the model's directory and the description file
    linked: tuple[Path, ...] = ()  # files elsewhere, whose permissions are not ours to change
    shared: tuple[Path, ...] = ()  # directories of inputs and outputs, which other engines of this worker use too
    log: Path | None = None


class Enclosures:
    """Makes and removes enclosures. All methods block."""

    def __init__(self, data: Path, chosen: Confinement, hidden: Collection[Path] = ()) -> None:
        """`hidden` lists further paths that engines must not see, inside or outside `data`."""
        self.confinement = chosen
        self._data = data
        self._homes = data / "engines"
        self._temporary = data / "tmp"
        self._hidden = (data, *hidden)
        self._readable: set[tuple[Path, int]] = set()  # trees made readable for the engine user, by path and inode

    def prepare(self) -> None:
        """Before the first start: create directories, grant the engine user access, remove leftovers of processes."""
        user = self.confinement.user
        if user is not None:
            ownership.check_way(self._data, user)
        for path in (self._homes, self._temporary):
            path.mkdir(mode=0o750, parents=True, exist_ok=True)
        if user is not None:
            names = ("backends", "models", "processes", "staging", "data")
            paths = [self._data, self._homes, self._temporary, *(self._data / name for name in names)]
            ownership.open_way([path for path in paths if path.is_dir()], user)
        for left in self._temporary.iterdir():
            disk.remove_tree(left)

    def enclose(self, needs: EngineNeeds) -> Enclosure:
        """Make the enclosure of a process. `remove` ends it."""
        if not self.confinement.is_on:
            return Enclosure(allowed=Allowed(), tree=needs.tree)
        graphics.make_devices(graphics.DevicePaths())
        home = self._homes / needs.directory
        temporary = self._temporary_of(needs.nonce)
        for path in (home, temporary):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        tree = needs.tree
        if writable_trees.is_needed(tree):
            tree = writable_trees.make(tree, temporary)
        if needs.log is not None:
            needs.log.touch(mode=0o600)  # confinement rules apply only to existing files
        self._hand_over(needs, home, temporary)
        allowed = Allowed(
            read=(needs.tree, *needs.read, *needs.linked, *self._interpreters(needs.tree)),
            write=(needs.log,) if needs.log is not None else (),
            own=(home, temporary, *needs.shared),
            hidden=self._hidden,
        )
        return Enclosure(allowed=allowed, tree=tree, environment=self._environment(home, temporary))

    @contextlib.contextmanager
    def for_check(self, tree: Path) -> Iterator[Enclosure]:
        """An enclosure for the check of a backend that is being installed and has no home yet."""
        if not self.confinement.is_on:
            yield Enclosure(allowed=Allowed(), tree=tree)
            return
        user = self.confinement.user
        with tempfile.TemporaryDirectory(prefix="enginehouse-") as scratch:
            own = Path(scratch)
            if user is not None:
                ownership.give(own, user)
                ownership.open_way([one for one in tree.parents if one.is_relative_to(self._data)], user)
                ownership.let_read(tree, user)
            allowed = Allowed(read=(tree, *self._interpreters(tree)), own=(own,), hidden=self._hidden)
            yield Enclosure(allowed=allowed, tree=tree, environment=self._environment(own, own))

    def confined(self, enclosure: Enclosure) -> contextlib.AbstractContextManager[Confined | None]:
        return confinement.confined(self.confinement, enclosure.allowed)

    def remove(self, nonce: str) -> None:
        disk.remove_tree(self._temporary_of(nonce))

    def explain(self, reason: str, lines: Sequence[str]) -> str:
        """Why an engine ended; with a hint at its confinement if one of its last `lines` shows a refusal."""
        refused = next((line for line in reversed(lines) if _REFUSAL.search(line)), "")
        if not refused or not self.confinement.is_on:
            return reason
        user = self.confinement.user
        reach = f"let {user.name} read the file, or " if user is not None else ""
        flags = "without --engine-user" if user is not None else "with --engine-confinement off"
        if user is not None and self.confinement.landlock_abi:
            flags = "without --engine-user or with --engine-confinement off"
        return (
            f"{reason if refused in reason else f'{reason} ({refused})'}; engines on this node are confined "
            f"({self.confinement.described}). If the engine needs this access, {reach}start the worker {flags}"
        )

    def tidy(self, backends: Collection[str]) -> None:
        """Remove the homes of all backends except the given ones."""
        for home in self._homes.iterdir() if self._homes.is_dir() else ():
            if home.name not in backends:
                disk.remove_tree(home)

    def _environment(self, home: Path, temporary: Path) -> dict[str, str]:
        user = self.confinement.user
        return {
            "HOME": str(home),
            "TMPDIR": str(temporary),
            "XDG_CACHE_HOME": str(home / ".cache"),
            "XDG_CONFIG_HOME": str(home / ".config"),
            "XDG_DATA_HOME": str(home / ".local" / "share"),
            "XDG_RUNTIME_DIR": str(temporary),
            # The engine cannot write next to its modules, and compiling them at every start would take long.
            "PYTHONPYCACHEPREFIX": str(home / "pycache"),
            **({"USER": user.name} if user is not None else {}),
        }

    def _interpreters(self, tree: Path) -> list[Path]:
        return [part for path in interpreters(tree) for part in confinement.without(path, self._hidden)]

    def _temporary_of(self, nonce: str) -> Path:
        return self._temporary / nonce[:_NAME_LENGTH]

    def _hand_over(self, needs: EngineNeeds, home: Path, temporary: Path) -> None:
        user = self.confinement.user
        if user is None:
            return
        for path in (home, temporary):
            ownership.give(path, user)
        tree = (needs.tree, needs.tree.stat().st_ino)
        if tree not in self._readable:
            ownership.let_read(needs.tree, user)
            self._readable.add(tree)
        for path in needs.read:
            ownership.let_read(path, user)
        if needs.log is not None:
            ownership.give(needs.log, user)


def interpreters(tree: Path) -> Iterator[Path]:
    """The parts of the Python installations outside the tree that its environments and its run file use."""
    found = [path for pattern in ("bin/python*", "*/bin/python*") for path in tree.glob(pattern)]
    shebang = _first_line(tree / RUN_FILE)
    if shebang.startswith("#!") and "python" in shebang:
        found.append(Path(shebang[2:].split()[0]))
    seen: set[Path] = set()
    for program in found:
        for path in _python_parts(program):
            if path not in seen and not path.is_relative_to(tree):
                seen.add(path)
                yield path


def _python_parts(program: Path) -> Iterator[Path]:
    """Only parts of a Python installation or of an environment: an image may name any path."""
    environment = program.parent.parent
    configuration = environment / "pyvenv.cfg"
    if configuration.is_file():
        yield configuration
        yield from _parts(environment)
        home = next((line for line in _lines(configuration) if line.partition("=")[0].strip() == "home"), "")
        yield from _installation(Path(home.partition("=")[2].strip() or "/nowhere"))
    yield from _installation(Path(os.path.realpath(program)).parent)


def _installation(programs: Path) -> Iterator[Path]:
    prefix = programs.parent
    if any(prefix.glob("lib/python3*/os.py")):
        yield from _parts(prefix)


def _parts(prefix: Path) -> Iterator[Path]:
    yield from (prefix / name for name in ("bin", "lib", "lib64"))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []


def _first_line(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.readline(_FIRST_LINE_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return ""
