"""Files: whole or not at all, locked, hashed."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from enginehouse.core.errors import Conflict, Hopeless
from enginehouse.host import disk


def test_a_file_is_replaced_whole_and_private_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "key"
    disk.write_atomic(path, b"one", mode=0o600)
    disk.write_atomic(path, b"two", mode=0o600)
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["key"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    disk.write_atomic(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            disk.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_and_other_faults_may_heal() -> None:
    full = disk.storage_error(OSError(errno.ENOSPC, "No space left on device"), "install x")
    assert (full.code, str(full)[:18]) == ("insufficient_disk", "cannot install x: ")
    assert disk.storage_error(OSError(errno.EIO, "Input/output error"), "install x").code == "resource_exhausted"


def test_two_directories_are_swapped_in_one_step(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "was").write_text(name)
    assert disk.exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "was").read_text() == "b"
    assert (tmp_path / "b" / "was").read_text() == "a"
    with pytest.raises(FileNotFoundError):
        disk.exchange(tmp_path / "a", tmp_path / "absent")


def test_a_tree_with_links_is_synced_and_removed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "below").mkdir(parents=True)
    (tree / "below" / "file").write_text("x")
    (tree / "nowhere").symlink_to("/does/not/exist")
    (tmp_path / "outside").write_text("kept")
    (tree / "link").symlink_to(tmp_path / "outside")
    disk.sync_tree(tree)
    disk.remove_tree(tree)
    disk.remove_tree(tree)
    assert os.listdir(tmp_path) == ["outside"]


def test_the_hash_of_a_file_is_told_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = os.urandom(3 * 1024 * 1024 + 17)
    path.write_bytes(content)
    told: list[int] = []
    assert disk.sha256_of(path, told.append) == hashlib.sha256(content).hexdigest()
    assert told == sorted(told)
    assert told[-1] == len(content)


@pytest.mark.parametrize(("option", "what"), [("--data", "data directory"), ("--backends-path", "backends directory")])
def test_a_directory_that_cannot_be_used_is_named_with_the_option_that_chose_it(
    tmp_path: Path, option: str, what: str
) -> None:
    told = f"cannot use {tmp_path} as {what}: "
    for error, reason in (
        (
            OSError(errno.ENOSPC, "No space left on device"),
            f"no space left on the disk; free some space or choose another {option}",
        ),
        (PermissionError(errno.EACCES, "Permission denied", str(tmp_path)), "Permission denied; make it writable"),
        (PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "lock")), "lock in it: Permission denied"),
    ):
        with pytest.raises(Hopeless) as refused, disk.naming_the_file(tmp_path, option):
            raise error
        assert refused.value.message.startswith(told + reason)
        assert option in refused.value.message


def test_a_lock_on_a_full_disk_is_a_lock(tmp_path: Path) -> None:
    """The limit on the size of files is what a full disk is to a write."""
    program = (
        "import resource, signal, sys; from pathlib import Path; from enginehouse.host import disk\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "held = disk.Lock(Path(sys.argv[1]), 'test')\n"
        "try: disk.Lock(Path(sys.argv[1]), 'try')\n"
        "except disk.Conflict as error: print(error.message)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "lock"], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    assert f"cannot try: {tmp_path} is in use by process unknown" in said


def test_a_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    script = (
        "import sys; from pathlib import Path; from enginehouse.host.disk import Lock; "
        "held = Lock(Path(sys.argv[1]), 'x'); print('held', flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Conflict, match=f"cannot run a worker: .* in use by process {holder.pid}"):
            disk.Lock(path, "run a worker")
    finally:
        holder.kill()
        holder.communicate()
    lock = disk.Lock(path, "run a worker")
    lock.release()
    disk.Lock(path, "run a worker").release()
