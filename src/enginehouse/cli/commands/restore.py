"""`enginehouse restore`: a server from a backup. Calls run.restore."""

from __future__ import annotations

import os
from pathlib import Path

import click

from enginehouse.cli.options import passphrases
from enginehouse.cli.options.shared import NO_SERVER, command, described, emit_json, given
from enginehouse.cli.terminal import output
from enginehouse.settings.programs import FrontendSettings, load


@command(
    "restore",
    meanings=NO_SERVER,
    examples=(
        "enginehouse restore ~/enginehouse.backup",
        "enginehouse restore enginehouse.backup --data /var/lib/enginehouse --passphrase-file ~/.backup-passphrase",
        "ENGINEHOUSE_DATABASE_URL=postgresql://… enginehouse restore enginehouse.backup   # also one from SQLite",
    ),
)
@click.argument("file", type=click.Path(path_type=Path))
@passphrases.passphrase_file
@described("database_url", "URL")
@click.option("--force", is_flag=True, help="Replace the database and the keys that are there.")
def entry(file: Path, passphrase_file: str | None, database_url: str | None, force: bool) -> None:
    """Bring a server back from the backup FILE, into an empty data directory and an empty database.

    FILE is read to its end before anything is changed. It may come from the other kind of database, and from an older
    version. With --force, replaced files are moved into a directory `replaced-TIME` of the data directory.
    """
    settings = load(FrontendSettings, {"data": given().data, "database_url": database_url}, os.environ)
    file = file.expanduser()
    from enginehouse import run

    passphrase = ""
    if run.is_encrypted(file):
        passphrase = passphrases.given_passphrase(passphrase_file) or passphrases.asked_passphrase(str(file))
    made = run.restore(file, settings.data, settings.database_url, passphrase, force=force)
    if emit_json(made):
        return
    of = made.about
    output.say(
        f"restored the backup of {of.created_at} (Enginehouse {of.version}, schema {of.schema}) into {settings.data}: "
        f"{made.rows} rows, {len(made.files)} files"
    )
    if made.moved_to:
        output.remark(f"what was there before is in {made.moved_to}")
    output.remark("start the server as before; workers connect by themselves if it has the address that they know")
