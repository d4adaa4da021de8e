"""Backups: the same rows on either database, all of a file or nothing, and what a kill in the middle leaves."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text
from tests.store.old_rows import NODE, ROWS, Rows, engine_of, lost, make_old, rows_of

from enginehouse import backups
from enginehouse.core.errors import Conflict, EnginehouseError, Invalid
from enginehouse.core.ids import NodeId
from enginehouse.core.key_record import RECORD, fingerprint_of, record_text
from enginehouse.host import data_files, sealed_file
from enginehouse.store import migrating, supersession
from enginehouse.store.db import Store

KEYS = {name: f"{name} is a secret\n".encode() for name in data_files.KEPT_FILES}
PASSPHRASE = "correct horse"
# What a restore changes on purpose: generations go on above all that were ever seen.
CHANGED = {"subjects", "cluster_values"}


@pytest.fixture(autouse=True)
def _quick_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key in a hundredth of a second, instead of one that takes a guesser long."""
    monkeypatch.setattr(sealed_file, "OPERATIONS", 1)
    monkeypatch.setattr(sealed_file, "MEMORY_BYTES", 8192)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_keys(tmp_path / "data")


def write_keys(data: Path) -> Path:
    (data / "bus").mkdir(parents=True)
    for name, content in KEYS.items():
        (data / name).write_bytes(content)
    return data


def old_server(data: Path, revision: str = migrating.NEWEST) -> str:
    """A data directory with a database of some schema; its URL."""
    url = f"sqlite:///{data / 'enginehouse.db'}"
    make_old(url, revision)
    return url


def kept(rows: Rows) -> Rows:
    return {name: some for name, some in rows.items() if name not in CHANGED}


def backed_up(data: Path, url: str, passphrase: str = "") -> Path:
    made = data.with_name("made.backup")
    backups.make(made, data, url, passphrase)
    return made


@pytest.mark.parametrize("passphrase", ["", PASSPHRASE])
def test_a_backup_of_one_database_restores_into_the_other_and_back(
    data: Path, tmp_path: Path, postgres: Callable[..., str], passphrase: str
) -> None:
    url = old_server(data)
    before = rows_of(url)
    made = backed_up(data, url, passphrase)
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert (b"is a secret" in made.read_bytes()) is False, "it is packed, and with a passphrase encrypted"
    server = postgres("template1")
    found = backups.restore(made, tmp_path / "second", server, passphrase)
    assert (found.is_encrypted, found.rows) == (bool(passphrase), sum(len(rows) for rows in before.values()))
    assert lost(kept(before), rows_of(server)) == []
    assert not (tmp_path / "second" / "enginehouse.db").exists()
    again = backed_up(tmp_path / "second", server)
    third = f"sqlite:///{tmp_path / 'third' / 'enginehouse.db'}"
    backups.restore(again, tmp_path / "third", third, "")
    assert lost(kept(before), rows_of(third)) == []
    assert {name: len(rows) for name, rows in rows_of(third).items()} == {
        name: len(rows) + (name == "cluster_values") for name, rows in before.items()
    }
    for name, content in KEYS.items():
        assert (tmp_path / "third" / name).read_bytes() == content
        assert stat.S_IMODE((tmp_path / "third" / name).stat().st_mode) == 0o600


@pytest.mark.parametrize("revision", ["0001", "0010", "0018"])
async def test_a_backup_of_an_older_schema_migrates(
    data: Path, tmp_path: Path, postgres: Callable[..., str], revision: str
) -> None:
    made = backed_up(data, old_server(data, revision))
    assert backups.verify(made, "").about.schema == revision
    for url in (postgres("template1"), f"sqlite:///{tmp_path / 'new' / 'enginehouse.db'}"):
        backups.restore(made, tmp_path / f"new{len(url)}", url, "")
        store = await Store.open(url)
        store.close()
        found = rows_of(url)
        assert [row["name"] for row in found["nodes"]] == ["attic", "cellar"]
        assert {row["name"] for row in found["tokens"]} == {"admin", "app"}


async def test_generations_go_on_above_all_that_workers_have_seen(data: Path, tmp_path: Path) -> None:
    made = backed_up(data, old_server(data))
    target = f"sqlite:///{tmp_path / 'new' / 'enginehouse.db'}"
    backups.restore(made, tmp_path / "new", target, "")
    store = await Store.open(target)
    places = [(NodeId(NODE), "backend:llama-cpp"), (NodeId(NODE), "backend:never-requested")]
    found = await store.transaction(lambda connection: supersession._lock_subjects(connection, places))
    store.close()
    assert min(found.values()) > 1_000_000
    assert max(found.values()) < 2**31 - 1_000_000


def test_a_file_that_is_cut_off_or_altered_is_refused_and_changes_nothing(data: Path, tmp_path: Path) -> None:
    url = old_server(data)
    for passphrase in ("", PASSPHRASE):
        content = backed_up(data, url, passphrase).read_bytes()
        damaged = tmp_path / "damaged.backup"
        step = max(1, len(content) // 60)
        variants = [content[:size] for size in range(0, len(content), step)] + [content[:-1], content + b"x"]
        variants += [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in range(0, len(content), step)]
        for variant in variants:
            damaged.write_bytes(variant)
            with pytest.raises(Invalid) as caught:
                backups.restore(damaged, tmp_path / "new", f"sqlite:///{tmp_path / 'new' / 'x.db'}", passphrase)
            assert caught.value.message.count("\n") == 0
            assert not (tmp_path / "new").exists()


def test_a_wrong_passphrase_is_said_as_such(data: Path, tmp_path: Path) -> None:
    made = backed_up(data, old_server(data), PASSPHRASE)
    for wrong in ("", "correct horsf"):
        with pytest.raises(Invalid, match="the passphrase is wrong"):
            backups.verify(made, wrong)
    backups.verify(made, PASSPHRASE)


def test_a_backup_of_a_newer_schema_is_refused(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = backed_up(data, old_server(data))
    known = migrating.revisions()
    monkeypatch.setattr(migrating, "revisions", lambda: known[:-1])
    with pytest.raises(Invalid, match=f"with the schema {known[-1]}; this program .* knows up to {known[-2]}"):
        backups.restore(made, tmp_path / "new", f"sqlite:///{tmp_path / 'new.db'}", "")


def test_what_is_there_is_replaced_only_by_force_and_moved_aside(data: Path, tmp_path: Path) -> None:
    url = old_server(data)
    made = backed_up(data, url)
    (data / "models").mkdir()
    (data / "admin.token").write_text("another one")
    with pytest.raises(Conflict, match="give --force"):
        backups.restore(made, data, url, "")
    assert (data / "admin.token").read_text() == "another one"
    held = sqlite3.connect(data / "enginehouse.db")
    held.execute("pragma journal_mode=wal")
    held.execute("select * from nodes").fetchall()
    with pytest.raises(Conflict, match="another program has it open"):
        backups.restore(made, data, url, "", force=True)
    held.close()
    assert not (data / data_files.UNFINISHED).exists()
    found = backups.restore(made, data, url, "", force=True)
    aside = Path(found.moved_to)
    assert aside.parent == data
    assert (aside / "admin.token").read_text() == "another one"
    assert (aside / "enginehouse.db").exists()
    assert (data / "models").is_dir()
    assert (data / "admin.token").read_bytes() == KEYS["admin.token"]


def test_a_used_database_on_a_server_is_replaced_only_by_force_and_never_under_a_frontend(
    data: Path, tmp_path: Path, postgres: Callable[..., str]
) -> None:
    made = backed_up(data, old_server(data))
    server = postgres("template1")
    backups.restore(made, tmp_path / "first", server, "")
    with pytest.raises(Conflict, match="it is not empty"):
        backups.restore(made, tmp_path / "second", server, "")
    with psycopg.connect(server) as connection:
        connection.execute("update tokens set name = 'changed'")
        connection.commit()
        with pytest.raises(Conflict, match="stop every frontend"):
            backups.restore(made, tmp_path / "second", server, "", force=True)
    assert {row["name"] for row in rows_of(server)["tokens"]} == {"changed"}
    backups.restore(made, tmp_path / "second", server, "", force=True)
    assert {row["name"] for row in rows_of(server)["tokens"]} == {"admin", "app"}


def test_tables_of_another_program_are_never_touched(data: Path, tmp_path: Path, postgres: Callable[..., str]) -> None:
    made = backed_up(data, old_server(data))
    server = postgres("template1")
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("create table nodes (id integer)")
    with pytest.raises(Conflict, match="another program has the table nodes"):
        backups.restore(made, tmp_path / "new", server, "", force=True)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_backup_waits_for_no_writer_that_is_frozen(data: Path, postgres: Callable[..., str], kind: str) -> None:
    url = old_server(data)
    if kind == "postgres":
        made = backed_up(data, url)
        url = postgres("template1")
        backups.restore(made, data.with_name("new"), url, "")
    # A transaction that a stopped frontend never ends, with its changes unseen.
    engine = engine_of(url)
    with engine.connect() as connection:
        connection.execute(text("delete from tokens"))
        backed_up(data, url)
        connection.rollback()
    engine.dispose()
    assert backups.verify(data.with_name("made.backup"), "").rows >= sum(len(rows) for rows in ROWS.values())


def test_a_backup_without_the_keys_of_its_database_is_refused(data: Path, tmp_path: Path) -> None:
    url = old_server(data)
    tokens = {"admin.token": b"one", "node.key": b"two"}
    engine = engine_of(url)
    with engine.begin() as connection:
        recorded = {"name": RECORD, "text": record_text({}, tokens)}
        connection.execute(text("insert into cluster_values (name, value) values (:name, :text)"), recorded)
    engine.dispose()
    (data / "node.key").unlink()
    # Of a token that is no longer valid, the file may be gone.
    assert fingerprint_of(b"one") not in "d" * 64
    (data / "admin.token").unlink()
    with pytest.raises(Invalid, match=r"lacks node\.key\. "):
        backed_up(data, url)
    assert list(tmp_path.glob("*.backup")) == []


def test_a_file_of_somebody_is_not_replaced_by_a_backup(data: Path, tmp_path: Path) -> None:
    url, mine = old_server(data), tmp_path / "letter.txt"
    mine.write_text("dear friend")
    with pytest.raises(Conflict, match="is not a backup"):
        backups.make(mine, data, url, "")
    assert mine.read_text() == "dear friend"
    backups.make(mine, data, url, "", force=True)
    backups.make(mine, data, url, PASSPHRASE)
    assert backups.verify(mine, PASSPHRASE).is_encrypted


_KILLED = """
import os, sys
from pathlib import Path
from enginehouse import backups
from enginehouse.host import disk
left = [int(sys.argv[1])]
for module, name in ((os, "replace"), (disk, "write_atomic"), (os, "unlink")):
    def counted(*arguments, real=getattr(module, name), **more):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), 9)
        return real(*arguments, **more)
    setattr(module, name, counted)
made, data, url = Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
backups.restore(made, data, url, "", force=True)
"""


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_restore_that_is_killed_anywhere_leaves_the_old_server_or_is_run_again(
    data: Path, tmp_path: Path, postgres: Callable[..., str], kind: str
) -> None:
    made = backed_up(data, old_server(data))
    place = write_keys(tmp_path / "place")
    url = f"sqlite:///{place / 'enginehouse.db'}" if kind == "sqlite" else postgres("template1")
    for name in KEYS:
        (place / name).write_text("of the old server")
    make_old(url, migrating.NEWEST)
    engine = engine_of(url)
    with engine.begin() as connection:
        connection.execute(text("update tokens set name = 'old'"))
    engine.dispose()
    untouched, unfinished = 0, 0
    for number in (2, 5, 9, 14, 19):
        if kind == "sqlite":
            trial = tmp_path / f"trial-{number}"
            shutil.copytree(place, trial)
            where = f"sqlite:///{trial / 'enginehouse.db'}"
        else:
            trial, where = place, url
        done = subprocess.run([sys.executable, "-c", _KILLED, str(number), str(made), str(trial), where])
        assert done.returncode == -signal.SIGKILL
        names = {row["name"] for row in rows_of(where)["tokens"]}
        if (trial / data_files.UNFINISHED).exists():
            unfinished += 1
            with pytest.raises(Conflict, match="run the same `enginehouse restore` again"):
                data_files.refuse_unfinished(trial)
        else:
            untouched += 1
            assert names == {"old"}
            assert {(trial / name).read_text() for name in KEYS} == {"of the old server"}
            continue
        backups.restore(made, trial, where, "")  # without --force: it goes on
        data_files.refuse_unfinished(trial)
        assert {row["name"] for row in rows_of(where)["tokens"]} == {"admin", "app"}
        assert {name: (trial / name).read_bytes() for name in KEYS} == KEYS
        if kind == "postgres":
            break
    assert unfinished
    assert untouched or kind == "postgres"


def test_errors_are_of_the_tree_and_name_the_file(data: Path, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", Path("/etc/passwd")):
        with pytest.raises(EnginehouseError) as caught:
            backups.verify(path, "")
        assert str(path) in caught.value.message


def test_a_restore_onto_a_full_disk_says_what_to_do_and_leaves_nothing(
    data: Path, tmp_path: Path, small_disk: Path
) -> None:
    made = backed_up(data, old_server(data))
    left = small_disk / "left"
    left.mkdir()
    (small_disk / "filler").write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 100_000))
    with pytest.raises(EnginehouseError, match="Free some space there, and run it again"):
        backups.restore(made, left, f"sqlite:///{left / 'enginehouse.db'}", "", force=False)
    assert [one.name for one in left.iterdir() if one.name != "lock"] == []
