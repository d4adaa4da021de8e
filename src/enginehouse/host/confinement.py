"""Confinement of engines: which kind this machine has, and what a confined child does between fork and exec.

Two kinds, which add up: Landlock (`host/landlock`), and another user where the worker is root. A child that cannot be
confined ends instead of starting. What an engine may use of the machine is listed here; what is its own (tree, model,
home) is the worker's to say.
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
UNCONFINED_EXIT = 126  # what a child ends with that could not be confined

# Libraries, programs, settings and figures of the system. Of /run only what libraries look at: it also holds secrets.
_SYSTEM = (
    "/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/etc", "/opt", "/proc", "/sys", "/snap",
    "/nix/store", "/gnu/store", "/run/systemd/resolve",
    # Where some systems have what others have in /usr and /etc, behind links.
    "/usr/local", "/var/lib/ca-certificates", "/var/lib/snapd/lib",
)  # fmt: skip
_RUNTIME = (
    "resolvconf", "NetworkManager", "connman", "netconfig", "nscd", "opengl-driver", "opengl-driver-32",
    "current-system", "udev", "nvidia*",
)  # fmt: skip
_NAME_SERVERS = "/etc/resolv.conf"  # often a link to where the name servers are written
# By name, because a worker that is root could else hand out the disks.
_DEVICES = (
    "null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "dri", "kfd", "accel", "dxg", "infiniband",
    "nvidia*", "nvhost*", "nvgpu", "nvmap", "nvsci*", "host1x*", "mali*", "davinci*", "devmm_svm",
    "hisi_hdc", "hl*", "neuron*", "apex_*", "tenstorrent", "dma_heap", "udmabuf", "rknpu", "galcore",
)  # fmt: skip
_SHARED_MEMORY = (Path("/dev/shm"), Path("/dev/mqueue"), Path("/dev/hugepages"))

_PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _CLEAR_ALL = 38, 24, 47, 4
_LAST_CAPABILITY = 63
# What Docker leaves to root in a container (backends are made for those), without making devices and raw sockets (the
# network is the machine's), and with locking memory, priorities and limits. None of these leads around Landlock;
# loading kernel modules, reading raw memory or listening to what others send would.
_KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 14, 18, 23, 24, 29, 31})
_CAPABILITY_VERSION = 0x20080522
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class User(Struct, frozen=True):
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...] = ()  # those of graphics cards, most of all


class Confinement(Struct, frozen=True, kw_only=True):
    """What keeps engines apart from the rest of this machine."""

    landlock_abi: int = 0
    user: User | None = None
    reason: str = ""  # why there is none

    @property
    def is_on(self) -> bool:
        return bool(self.landlock_abi or self.user)

    @property
    def protects_trees(self) -> bool:
        """Whether an engine cannot write to its own tree, so that trees may share files. Another user alone does not
        see to that: an image may have files that everybody can write to.
        """
        return bool(self.landlock_abi)

    @property
    def described(self) -> str:
        kinds = ["landlock"] if self.landlock_abi else []
        kinds += [f"user {self.user.name}"] if self.user is not None else []
        return ", ".join(kinds) or f"none: {self.reason}"


NONE = Confinement(reason="this worker was not asked to")


class Allowed(Struct, frozen=True, kw_only=True):
    """What is a process's own."""

    read: Sequence[Path] = ()
    write: Sequence[Path] = ()  # files that may be written to: logs, which a shell opens anew as /dev/stderr
    own: Sequence[Path] = ()  # everything but devices
    hidden: Sequence[Path] = ()  # what stays hidden where a directory of the system holds it


class Confined(Struct, frozen=True, kw_only=True):
    """For one start: the user to become, and what to call between fork and exec."""

    enter: Callable[[], None]
    user: User | None = None


def choose(mode: Mode, user: str) -> Confinement:
    """The confinement of this machine's engines. `Invalid` where `user` cannot be become."""
    if mode == "off":
        if user:
            raise Invalid(
                f"cannot use --engine-user {user} with --engine-confinement off: leave one of them out",
                code="invalid_setting",
                param="engine_user",
            )
        return Confinement(reason="switched off with --engine-confinement off")
    abi, reason = landlock.look()
    return Confinement(landlock_abi=abi, user=find_user(user) if user else None, reason=reason)


def find_user(name: str) -> User:
    def refuse(why: str) -> Invalid:
        return Invalid(f"cannot run engines as {name}: {why}", code="invalid_setting", param="engine_user")

    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise refuse("this machine has no such user; make one with `useradd --system`") from None
    if os.geteuid() != 0:
        raise refuse("only a worker that runs as root can; start it as root or leave --engine-user out")
    if found.pw_uid == 0:
        raise refuse("that is root again; name a user without rights")
    return User(name, found.pw_uid, found.pw_gid, tuple(os.getgrouplist(name, found.pw_gid)))


@contextlib.contextmanager
def confined(confinement: Confinement, allowed: Allowed) -> Iterator[Confined | None]:
    """What a child must do to be confined, for one start; None where there is no confinement. Blocks for a moment."""
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
    """`path`, or what is in it without `hidden`, where that lies in it: rules can only add."""
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
    """Bound to what it needs: between fork and exec nothing may be imported or looked up."""
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
    """Root without what would lead around the confinement; exec gives a root process no more than is left here."""
    if _libc is None:
        return None
    prctl, capset = _libc.prctl, _libc.capset
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    current = (ctypes.c_uint32 * 6)()  # twice: effective, permitted, inheritable
    _libc.capget(header, current)
    kept = [sum(1 << (one % 32) for one in _KEPT_CAPABILITIES if one // 32 == half) for half in (0, 1)]
    wanted = (ctypes.c_uint32 * 6)()
    for half in (0, 1):
        wanted[3 * half] = wanted[3 * half + 1] = current[3 * half + 1] & kept[half]
    dropped = [one for one in range(_LAST_CAPABILITY + 1) if one not in _KEPT_CAPABILITIES]

    def drop() -> None:
        for one in dropped:
            prctl(_PR_CAPBSET_DROP, one, 0, 0, 0)  # those that this kernel does not know are refused
        prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)
        capset(header, wanted)

    return drop
