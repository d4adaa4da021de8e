"""`enginehouse backup`: the database, keys and settings of a server in one file. Calls run.backup."""

from __future__ import annotations

import os
from pathlib import Path

import click

from enginehouse.cli.options import passphrases
from enginehouse.cli.options.shared import NO_SERVER, command, described, emit_json, given
from enginehouse.cli.terminal import output
from enginehouse.settings.programs import FrontendSettings, load


@command(
    "backup",
    meanings=NO_SERVER,
    examples=(
        "enginehouse backup ~/enginehouse.backup",
        "enginehouse backup /mnt/safe/enginehouse.backup --passphrase-file ~/.backup-passphrase",
        "ENGINEHOUSE_DATABASE_URL=postgresql://… enginehouse backup cluster.backup --data /var/lib/enginehouse",
    ),
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--encrypt", is_flag=True, help="Encrypt it with a passphrase, which is asked for.")
@passphrases.passphrase_file
@described("database_url", "URL")
@click.option("--force", is_flag=True, help="Replace FILE even if it is not a backup.")
def entry(file: Path, encrypt: bool, passphrase_file: str | None, database_url: str | None, force: bool) -> None:
    """Write the database, keys and settings of a server into FILE, also while it runs.

    Run it on the machine of the server, with its --data. FILE gets mode 0600 and replaces an older backup at once.
    Not in it: engines, models, uploads and logs. Without a passphrase, whoever reads FILE controls the cluster.
    """
    settings = load(FrontendSettings, {"data": given().data, "database_url": database_url}, os.environ)
    passphrase = passphrases.given_passphrase(passphrase_file)
    if encrypt and not passphrase:
        passphrase = passphrases.asked_passphrase("the new backup", twice=True)
    if passphrase:
        passphrases.checked(passphrase)
    from enginehouse import run

    made = run.backup(file.expanduser(), settings.data, settings.database_url, passphrase, force=force)
    if emit_json(made):
        return
    kind = "encrypted" if made.is_encrypted else "not encrypted"
    output.say(f"wrote {file}: {made.rows} rows, {len(made.files)} files, {output.size(made.size_bytes)}, {kind}")
    output.remark(f"files in it: {', '.join(made.files) or 'none'}")
    if not made.is_encrypted:
        output.remark("whoever reads this file controls the cluster; --encrypt or --passphrase-file encrypts it")
