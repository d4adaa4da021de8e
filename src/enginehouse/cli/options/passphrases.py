"""Where commands get a passphrase: a file, a variable or a terminal, never an argument, which other users can read."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from enginehouse.core.errors import Invalid

VARIABLE = "ENGINEHOUSE_BACKUP_PASSPHRASE"
MIN_LENGTH = 8
WAYS = f"give it with --passphrase-file FILE or {VARIABLE}"

passphrase_file = click.option(
    "--passphrase-file",
    metavar="FILE",
    help=f"Read the passphrase from the first line of FILE ({VARIABLE}).",
)


def given_passphrase(file: str | None) -> str:
    """The passphrase of a file or of the variable; "" if there is none."""
    if file is None:
        return os.environ.get(VARIABLE, "")
    try:
        with Path(file).expanduser().open(encoding="utf-8") as opened:
            found = opened.readline().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise _refused(f"cannot read a passphrase from {file!r}: {why}") from error
    if not found:
        raise _refused(f"cannot read a passphrase from {file!r}: its first line is empty")
    return found


def checked(passphrase: str) -> str:
    """A new passphrase, which must not be easy to guess."""
    if len(passphrase) < MIN_LENGTH:
        raise _refused(f"cannot use this passphrase: it has fewer than {MIN_LENGTH} characters")
    return passphrase


def asked_passphrase(what: str, *, twice: bool = False) -> str:
    """Ask on the terminal."""
    if not sys.stdin.isatty():
        raise _refused(f"cannot ask for the passphrase of {what}: this is no terminal; {WAYS}")
    passphrase: str = click.prompt(
        f"Passphrase of {what}", hide_input=True, confirmation_prompt="The same again" if twice else False, err=True
    )
    return passphrase


def _refused(message: str) -> Invalid:
    return Invalid(message, code="invalid_setting", param="passphrase")
