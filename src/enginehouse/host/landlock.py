"""Linux Landlock: limits on files, signals and other processes for a process and its descendants.

A ruleset lists the allowed uses of files. A process that restricts itself to it loses all others permanently. The
ruleset is built before the fork, so that the child makes only one system call. A restricted process also cannot trace
processes outside, and thus cannot read their memory or environment; from ABI 6 on it cannot signal them or connect to
their abstract sockets. Ioctls are not restricted, because graphics cards need them, nor is the network. Rules apply
to inodes: a path that is replaced later is not covered, unless its directory is allowed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture of Linux
_VERSION = 1  # flag of `_CREATE_RULESET`: return the supported ABI
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIRECTORY = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHARACTER_DEVICE, _MAKE_BLOCK_DEVICE = 1 << 6, 1 << 11
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_SCOPES = 0b11  # abstract sockets, signals

READ = _EXECUTE | _READ_FILE | _READ_DIRECTORY
LIST = _READ_DIRECTORY
DEVICE = _READ_FILE | _READ_DIRECTORY | _WRITE_FILE | _TRUNCATE
WRITE = _WRITE_FILE | _TRUNCATE
_ALL_OF_ABI_1 = (1 << 13) - 1
_ALL_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
OWN = (_ALL_OF_ABI_1 | _REFER | _TRUNCATE) & ~(_MAKE_CHARACTER_DEVICE | _MAKE_BLOCK_DEVICE)

_WHY_NOT = {
    errno.ENOSYS: "this kernel does not support Landlock",
    errno.EOPNOTSUPP: "Landlock is disabled on this machine",
}
# Loaded before any fork: no imports or lookups are allowed between fork and exec.
_syscall = ctypes.CDLL(None, use_errno=True).syscall if sys.platform == "linux" else None


def detect() -> tuple[int, str]:
    """Return the Landlock ABI of this kernel, or 0 and the reason."""
    if _syscall is None:
        return 0, "Landlock needs Linux"
    version = _syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION))
    if version > 0:
        return version, ""
    number = ctypes.get_errno()
    return 0, _WHY_NOT.get(number, f"Landlock cannot be used here: {os.strerror(number)}")


def handled_by(abi: int) -> int:
    """The file accesses that a kernel of this ABI can restrict, except ioctls on devices."""
    return _ALL_OF_ABI_1 | (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)


class Ruleset:
    """A set of allowed accesses. A context manager: closes its descriptor, which child programs do not inherit."""

    def __init__(self, abi: int) -> None:
        self._handled = handled_by(abi)
        # The kernel recognises the structure of an older ABI by its size.
        words = (self._handled, 0, _SCOPES)[: 3 if abi >= 6 else 2 if abi >= 4 else 1]
        attributes = struct.pack(f"={len(words)}Q", *words)
        self.descriptor = _checked(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))

    def __enter__(self) -> Ruleset:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def allow(self, path: Path, rights: int) -> None:
        """Allow `rights` on a path and everything below it. A missing path is ignored."""
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENXIO):
                return
            raise
        try:
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                rights &= _ALL_OF_FILES
            rule = struct.pack("=Qi", rights & self._handled, descriptor)
            if rights & self._handled:
                _checked(_ADD_RULE, ctypes.c_int(self.descriptor), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint(0))
        finally:
            os.close(descriptor)


def restrict(descriptor: int) -> bool:
    """Restrict the calling thread permanently. Safe between fork and exec; `no_new_privs` must be set before."""
    assert _syscall is not None
    return bool(_syscall(_RESTRICT_SELF, ctypes.c_int(descriptor), ctypes.c_uint(0)) == 0)


def _checked(number: int, *arguments: object) -> int:
    assert _syscall is not None
    found = int(_syscall(number, *arguments))
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock: {os.strerror(code)}")
    return found
