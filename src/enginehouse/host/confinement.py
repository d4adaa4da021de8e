"""Confinement of engines: the kinds that this machine supports, and the steps of a child between fork and exec.

There are two kinds, which can be combined: Landlock (`host.landlock`), and another user if the worker is root. A child
that cannot be confined exits instead of running. The parts of the system that engines may use are listed here; the
worker adds what belongs to one engine (tree, model, home).
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import os
import pwd
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from enginehouse.core.errors import Invalid
from enginehouse.host import landlock

Mode = Literal["auto", "off"]
UNCONFINED_EXIT = 126  # exit code of a child that could not be confined

# Libraries, programs, settings and statistics of the system. Of /run only what libraries read: it contains secrets.
_SYSTEM = (
    "/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/etc", "/opt", "/proc", "/sys", "/snap",
    "/nix/store", "/gnu/store", "/run/systemd/resolve",
    # Link targets of files that other systems have in /usr and /etc.
    "/usr/local", "/var/lib/ca-certificates", "/var/lib/snapd/lib",
)  # fmt: skip
_RUNTIME = (
    "resolvconf", "NetworkManager", "connman", "netconfig", "nscd", "opengl-driver", "opengl-driver-32",
    "current-system", "udev", "nvidia*",
)  # fmt: skip
_NAME_SERVERS = "/etc/resolv.conf"  # often a link to a generated file
# By name, because a root worker could otherwise expose the disks.
_DEVICES = (
    "null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "dri", "kfd", "accel", "dxg", "infiniband",
    "nvidia*", "nvhost*", "nvgpu", "nvmap", "nvsci*", "host1x*", "mali*", "davinci*", "devmm_svm",
    "hisi_hdc", "hl*", "neuron*", "apex_*", "tenstorrent", "dma_heap", "udmabuf", "rknpu", "galcore",
)  # fmt: skip
_SHARED_MEMORY = (Path("/dev/shm"), Path("/dev/mqueue"), Path("/dev/hugepages"))

_PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _CLEAR_ALL = 38, 24, 47, 4
_LAST_CAPABILITY = 63
# Docker's default set, for which backends are made, without device creation and raw sockets (engines use the network of
# the host), plus memory locking, priorities and resource limits. None of these bypasses Landlock; loading kernel
# modules, reading raw memory or capturing traffic would.
_KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 14, 18, 23, 24, 29, 31})
_CAPABILITY_VERSION = 0x20080522
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class User(Struct, frozen=True):
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...] = ()  # mainly for access to graphics cards


class Confinement(Struct, frozen=True, kw_only=True):
    """The confinement of the engines of this machine."""

    landlock_abi: int = 0
    user: User | None = None
    reason: str = ""  # why Landlock is not used

    @property
    def is_on(self) -> bool:
        return bool(self.landlock_abi or self.user)

    @property
    def protects_trees(self) -> bool:
        """Whether engines cannot write to their tree, even to world-writable files, so that trees may share files."""
        return bool(self.landlock_abi)

    @property
    def described(self) -> str:
        kinds = ["landlock"] if self.landlock_abi else []
        kinds += [f"user {self.user.name}"] if self.user is not None else []
        return ", ".join(kinds) or f"none: {self.reason}"


NONE = Confinement(reason="not requested")


class Allowed(Struct, frozen=True, kw_only=True):
    """Paths that belong to one process."""

    read: Sequence[Path] = ()
    write: Sequence[Path] = ()  # existing files: logs, which a shell reopens as /dev/stderr
    own: Sequence[Path] = ()  # all rights except creating devices
    hidden: Sequence[Path] = ()  # not readable, even inside a directory of the system


class Confined(Struct, frozen=True, kw_only=True):
    """The confinement of one start: the user to change to, and the function to call between fork and exec."""

    enter: Callable[[], None]
    user: User | None = None


def choose(mode: Mode, user: str) -> Confinement:
    """Return the confinement for the engines of this machine. Raises `Invalid` if `user` cannot be used."""
    if mode == "off":
        if user:
            raise Invalid(
                f"cannot use --engine-user {user} with --engine-confinement off: remove one of the two",
                code="invalid_setting",
                param="engine_user",
            )
        return Confinement(reason="disabled with --engine-confinement off")
    abi, reason = landlock.detect()
    return Confinement(landlock_abi=abi, user=find_user(user) if user else None, reason=reason)


def find_user(name: str) -> User:
    def refuse(why: str) -> Invalid:
        return Invalid(f"cannot run engines as {name}: {why}", code="invalid_setting", param="engine_user")

    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise refuse("there is no such user on this machine; create it with `useradd --system`") from None
    if os.geteuid() != 0:
        raise refuse("only a root worker can change the user; start it as root or omit --engine-user")
    if found.pw_uid == 0:
        raise refuse("this user is root; choose an unprivileged user")
    return User(name, found.pw_uid, found.pw_gid, tuple(os.getgrouplist(name, found.pw_gid)))


@contextlib.contextmanager
def confined(confinement: Confinement, allowed: Allowed) -> Iterator[Confined | None]:
    """Yield the confinement of one start, or None if there is none. Blocks briefly."""
    if not confinement.is_on:
        yield None
        return
    capabilities = _drop_capabilities() if os.geteuid() == 0 and confinement.user is None else None
    with contextlib.ExitStack() as stack:
        ruleset: landlock.Ruleset | None = None
        if confinement.landlock_abi:
            ruleset = stack.enter_context(landlock.Ruleset(confinement.landlock_abi))
            _fill(ruleset, allowed)
        yield Confined(enter=_entering(ruleset, capabilities), user=confinement.user)


def _fill(ruleset: landlock.Ruleset, allowed: Allowed) -> None:
    system = [*_SYSTEM, *_matching("/run", _RUNTIME)]
    for name in (*system, _NAME_SERVERS):
        for part in without(Path(name), allowed.hidden):
            ruleset.allow(part, landlock.READ)
    ruleset.allow(Path("/dev"), landlock.LIST)
    for device in _matching("/dev", _DEVICES):
        ruleset.allow(Path(device), landlock.DEVICE)
    for path in (*_SHARED_MEMORY, *allowed.own):
        ruleset.allow(path, landlock.OWN)
    for path in allowed.read:
        ruleset.allow(path, landlock.READ)
    for path in allowed.write:
        ruleset.allow(path, landlock.WRITE)


def without(path: Path, hidden: Iterable[Path]) -> list[Path]:
    """Return `path`, or its parts without `hidden` if that is inside: rules can only allow, not exclude."""
    real = os.path.realpath(path)
    inside = [one for one in map(os.path.realpath, hidden) if (one + "/").startswith(real.rstrip("/") + "/")]
    if not inside:
        return [path]
    try:
        entries = sorted(os.listdir(real)) if real not in inside else []
    except OSError:
        return []
    return [part for name in entries for part in without(Path(real, name), [Path(one) for one in inside])]


def _matching(directory: str, patterns: Iterable[str]) -> list[str]:
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    return [f"{directory}/{name}" for name in names if any(fnmatch.fnmatchcase(name, one) for one in patterns)]


def _entering(ruleset: landlock.Ruleset | None, capabilities: Callable[[], None] | None) -> Callable[[], None]:
    """Return the function for the child. All it needs is bound here: no imports or lookups between fork and exec."""
    prctl = _libc.prctl if _libc is not None else None
    descriptor = ruleset.descriptor if ruleset is not None else -1
    restrict, leave = landlock.restrict, os._exit

    def enter() -> None:
        if capabilities is not None:
            capabilities()
        if prctl is not None and prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            leave(UNCONFINED_EXIT)
        if descriptor >= 0 and not restrict(descriptor):
            leave(UNCONFINED_EXIT)

    return enter


def _drop_capabilities() -> Callable[[], None] | None:
    """Return a function that drops the capabilities of root that bypass confinement. Exec does not restore them."""
    if _libc is None:
        return None
    prctl, capset = _libc.prctl, _libc.capset
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    current = (ctypes.c_uint32 * 6)()  # two halves of effective, permitted, inheritable
    _libc.capget(header, current)
    kept = [sum(1 << (one % 32) for one in _KEPT_CAPABILITIES if one // 32 == half) for half in (0, 1)]
    wanted = (ctypes.c_uint32 * 6)()
    for half in (0, 1):
        wanted[3 * half] = wanted[3 * half + 1] = current[3 * half + 1] & kept[half]
    dropped = [one for one in range(_LAST_CAPABILITY + 1) if one not in _KEPT_CAPABILITIES]

    def drop() -> None:
        for one in dropped:
            prctl(_PR_CAPBSET_DROP, one, 0, 0, 0)  # fails harmlessly for capabilities unknown to this kernel
        prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)
        capset(header, wanted)

    return drop
